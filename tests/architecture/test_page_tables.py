"""Tables of pages whose content follows from the code say what the code does."""

import re
from pathlib import Path

import msgspec

from forgemq_contracts.run import LogLayout, RunConfiguration
from forgemq_contracts.run_changes import MAY_CHANGE, MAY_GROW
from forgemq_contracts.topics import BY_DLQ_NAME, OF_RUN, partition_count

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DEMO = {
    "run": "demo-1",
    "seed": 0,
    "model": {"path": "model"},
    "queues": [{"domain": "shop", "task_source": "", "agent": ""}],
    "trainer": {"steps": 1},
}


def section(page: str, heading: str) -> str:
    text = (DOCS / page).read_text(encoding="utf-8")
    _, _, rest = text.partition(f"\n{heading}\n")
    assert rest, f"{page} has no heading {heading!r}"
    return rest.partition("\n## ")[0]


def test_the_table_of_partitions_counts_the_topics_of_a_run():
    text = section("sizes.md", "## Partitions")
    rows = re.findall(r"^\| (\d+), (\d+) \| ([\d,]+) \|$", text, re.MULTILINE)
    assert len(rows) >= 3
    configuration = msgspec.convert(DEMO, RunConfiguration)
    for lanes, groups, said in rows:
        layout = LogLayout(lanes=int(lanes), group_partitions=int(groups))
        run = msgspec.structs.replace(configuration, log=layout)
        counted = sum(partition_count(topic, run) + topic.has_dlq for topic in OF_RUN)
        assert int(said.replace(",", "")) == counted, f"{lanes} lanes, {groups} group partitions"
    assert f"\n{len(BY_DLQ_NAME)} of them are for dead letters" in text


def test_the_page_of_resumes_names_every_field_that_may_change():
    text = section("read_a_run.md", "## Resume with changes")
    table = "\n".join(line for line in text.splitlines() if line.startswith("| "))
    lost = []
    for pattern in (*MAY_CHANGE, MAY_GROW):
        table_of_fields, _, field = pattern.rstrip("*").rpartition(".")
        # `loss.*` is any field of its table, `lanes*` the list itself.
        name = field or table_of_fields
        if not re.search(rf"\b{name}\b", table):
            lost.append(pattern)
    assert lost == []


def test_the_auditors_page_names_every_topic_that_is_trimmed_and_who_needs_it():
    text = (ROOT / "services/auditor/README.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| ")]
    said = {topic.strip(): needed for topics, needed in rows for topic in topics.split(",")}
    lost = []
    for topic in OF_RUN:
        needed = said.get(topic.name.removesuffix("-v1"), "")
        groups = [re.sub(r"^[a-z]+-positions$", "<service>-positions", g) for g in topic.needed_by]
        lost += [f"{topic.name}: {group}" for group in groups if f"`{group}`" not in needed]
    assert lost == []
