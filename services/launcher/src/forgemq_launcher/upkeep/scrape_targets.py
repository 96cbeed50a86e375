"""The file by which Prometheus finds the processes of a run, in its form for `file_sd_configs`."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from msgspec import Struct

from forgemq_launcher.upkeep.supervisor import ServiceSpec
from forgemq_launcher.whole_files import write_json
from forgemq_settings.environment import SettingsError, parse
from forgemq_telemetry.ports import metrics_port
from forgemq_telemetry.settings import TelemetrySettings

_NOBODY = "127.0.0.1:0"
"""An address at which nothing can listen."""
_ENGINES = ("FORGEMQ_INFERENCE_ENGINE_URL", "FORGEMQ_INFERENCE_PREFILL_URL")


class ScrapeTargets(Struct, frozen=True):
    """Addresses that share their labels."""

    targets: tuple[str, ...]
    labels: dict[str, str]


def scrape_targets(specs: Iterable[ServiceSpec], *, run: str) -> tuple[ScrapeTargets, ...]:
    """One for each process that serves metrics, engines with `job` engine; () if none does.

    A process with port 0 is left out: it chooses its port when it starts. With the exporter otlp
    services push, so only engines are there.

    Raises:
        SettingsError: a setting of the exporter is wrong.
    """
    found = []
    for spec in specs:
        settings = parse(TelemetrySettings, prefix="FORGEMQ_TELEMETRY_", environ=spec.environ)
        if settings.exporter == "none":
            continue
        service = spec.name.split("-")[0]
        port = metrics_port(service, settings) if settings.exporter == "prometheus" else 0
        lane = {} if spec.lane is None else {"lane": str(spec.lane)}
        if port:
            labels = {"job": service, "process": spec.name, "run": run, **lane}
            found.append(ScrapeTargets((f"{settings.host}:{port}",), labels))
        for name in _ENGINES:
            if url := spec.environ.get(name):
                labels = {"job": "engine", "run": run, **lane}
                found.append(ScrapeTargets((urlsplit(url).netloc,), labels))
    return tuple(found)


def failed_target(environ: Mapping[str, str], *, run: str) -> tuple[ScrapeTargets, ...]:
    """A target that stands for a run that failed; () if nobody scrapes its processes.

    All that could export the failure has ended with the run, perhaps before it was scraped once. So
    Prometheus learns it from the file: of this target `up` is 0, with the label `ended`.
    """
    try:
        settings = parse(TelemetrySettings, prefix="FORGEMQ_TELEMETRY_", environ=environ)
    except SettingsError:
        return ()  # The run failed before it came to its services, which refuse such a setting.
    if settings.exporter == "none":
        return ()
    return (ScrapeTargets((_NOBODY,), {"job": "run", "run": run, "ended": "failed"}),)


def write_targets(path: Path, targets: tuple[ScrapeTargets, ...]) -> None:
    """Write the file whole, for Prometheus may read it at any moment; no targets: no file."""
    if not targets:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(exist_ok=True)
    write_json(path, targets)
