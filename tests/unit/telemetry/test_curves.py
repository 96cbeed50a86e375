import math
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from forgemq_telemetry.curves import Curves, read_curves


def test_values_come_back_by_step(tmp_path: Path):
    curves = Curves(tmp_path / "run")
    curves.write(0, {"loss": 0.5, "success": 0.25})
    curves.write(1, {"loss": 0.25, "success": float("nan")})
    curves.close()
    read = read_curves(tmp_path / "run")
    assert read[0] == {"loss": 0.5, "success": 0.25}
    assert math.isnan(read[1]["success"])


def test_a_line_torn_by_a_crash_costs_that_line_only(tmp_path: Path):
    curves = Curves(tmp_path)
    curves.write(0, {"loss": 0.5})
    curves.close()
    with (tmp_path / "curves.jsonl").open("ab") as file:
        file.write(b'{"step": 1, "lo')
    again = Curves(tmp_path)
    again.write(1, {"loss": 0.25})
    again.close()
    assert read_curves(tmp_path) == {0: {"loss": 0.5}, 1: {"loss": 0.25}}


def test_a_step_written_again_after_a_resume_replaces_the_first(tmp_path: Path):
    for value in (0.5, 0.125):
        curves = Curves(tmp_path)
        curves.write(7, {"loss": value})
        curves.close()
    assert read_curves(tmp_path) == {7: {"loss": 0.125}}


def test_tensorboard_reads_the_same_values(tmp_path: Path):
    curves = Curves(tmp_path, formats=("jsonl", "tensorboard"))
    curves.write(3, {"loss": 0.5})
    curves.close()
    (path,) = tmp_path.glob("events.out.tfevents.*")
    events = [event for event in EventFileLoader(str(path)).Load() if event.summary.value]
    (value,) = events[0].summary.value
    assert (events[0].step, value.tag) == (3, "loss")
    assert value.tensor.float_val[0] == 0.5
