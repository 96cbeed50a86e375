"""An engine that a person starts in a terminal."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("arguments", "status", "printed"),
    [
        (["--model-path", "nowhere"], 1, "no model at nowhere: config.json is missing"),
        ([], 2, "the following arguments are required: --model-path"),
    ],
)
def test_what_cannot_be_started_is_said_in_one_line(tmp_path, arguments, status, printed):
    environ = {name: value for name, value in os.environ.items() if "ENGINE_PARENT" not in name}
    folder = tmp_path / "engine"
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "forgemq_sglang_cpu", *arguments),
            *("--port", "31999", "--folder", str(folder)),
        ],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout.count("Traceback")) == (status, 0)
    assert printed in ended.stdout
    assert not folder.exists()
