"""Files that a run's queues name are looked for before anything starts."""

import pytest

from forgemq_contracts.run import Model, Queue, RunConfiguration, Trainer
from forgemq_launcher.core.configuration import ConfigurationError
from forgemq_launcher.user_code import check_user_code


@pytest.mark.parametrize("field", ["task_file", "held_out_file"])
def test_a_file_of_tasks_that_is_not_there_is_refused_with_its_field(tmp_path, field):
    there = tmp_path / "there.jsonl"
    there.write_text("1\n")
    files = {"task_file": str(there), "held_out_file": str(there)}
    missing = str(tmp_path / "missing.jsonl")
    runs = [
        RunConfiguration(
            run="r",
            seed=0,
            model=Model(path="m"),
            queues=(Queue(domain="d", task_source="", agent="json:loads", **named),),
            trainer=Trainer(steps=1),
        )
        for named in (files, {**files, field: missing})
    ]
    check_user_code(runs[0])
    with pytest.raises(ConfigurationError, match=rf"^queues\.d\.{field}: there is no {missing}$"):
        check_user_code(runs[1])
