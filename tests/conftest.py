"""How several processes (pytest's ``-n``) divide the tests: by file, those of the cluster in one, and those
of a GPU each by itself, for they mostly compile kernels.
"""

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling


class Scheduling(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith("tests/gpu/"):
            return nodeid
        return "cluster" if nodeid.startswith("tests/cluster/") else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    return Scheduling(config, log)
