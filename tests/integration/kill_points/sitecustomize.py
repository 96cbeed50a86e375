"""Python loads this at the start of every process of a run whose PYTHONPATH begins with its folder.

KILLED_SERVICE names the service that gets a kill point, `trainer`, or `inference` of lane 0. The
trainer's process holds versions back, whichever is killed.
"""

import os
import sys

_service = os.environ.get("KILLED_SERVICE", "")
if _service and sys.orig_argv[-1:] == ["forgemq_trainer"]:
    import held_versions

    held_versions.arm(_service, os.environ["KILLED_AT"], mark=os.environ["KILLED_MARK"])

_is_meant = sys.orig_argv[-1:] == [f"forgemq_{_service}"]
if _is_meant and os.environ.get("FORGEMQ_INFERENCE_LANE", "0") == "0":
    import kill_point

    kill_point.arm(os.environ["KILLED_AT"], mark=os.environ["KILLED_MARK"])
