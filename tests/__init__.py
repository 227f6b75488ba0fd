"""The tests. Each of several processes has its share of the cores: threads of libraries that wait for others spin."""

import os

if "PYTEST_XDIST_WORKER" in os.environ and hasattr(os, "sched_setaffinity"):
    _number, _count = int(os.environ["PYTEST_XDIST_WORKER"][2:]), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    _cores = sorted(os.sched_getaffinity(0))
    if _count <= len(_cores):
        os.sched_setaffinity(0, _cores[_number::_count])  # before the first import of torch, which counts them
