"""A sweep on a Ray cluster of two nodes on this machine: the results of a local one, whatever dies on the way."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from diffcheck.errors import EnvironmentMissing, InputError
from diffcheck.journal import RECORDS
from diffcheck.sweeping import executors
from diffcheck.sweeping.search import SweepOptions, execute, plan

CODE = """
import os, signal
from pathlib import Path
import torch

HERE = Path(__file__).parent

class Dies:
    '''bf16, but the first process that is asked for it dies, and each one says where it is.'''

    def encode(self, x):
        import ray

        if ray.is_initialized():
            place = f"{os.getpid()} {ray.get_runtime_context().get_node_id()}"
            with (HERE / "places").open("a") as file:
                file.write(place + "\\n")
            try:
                (HERE / "died").touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return x.bfloat16()

    def decode(self, stored):
        return stored.float()

    def bytes(self, dim):
        return 2 * dim

class Fails(Dies):
    def encode(self, x):
        raise ValueError("not today")

dies, fails = Dies(), Fails()
"""


@pytest.fixture(scope="module")
def cluster():
    """Two nodes with one slot each; RAY_ADDRESS leads to them, as it would on a real cluster."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'diffcheck[ray]'")
    from ray.cluster_utils import Cluster

    memory = {"num_cpus": 1, "object_store_memory": 100 << 20}
    made = Cluster(initialize_head=True, head_node_args=memory | {"include_dashboard": False})
    made.add_node(**memory)
    before = os.environ.get("RAY_ADDRESS")
    os.environ["RAY_ADDRESS"] = made.address
    yield made
    os.environ.pop("RAY_ADDRESS")
    if before is not None:
        os.environ["RAY_ADDRESS"] = before
    made.shutdown()


def options(mini: Path, directory: Path, **changes) -> SweepOptions:
    (directory / "dies.py").write_text(CODE)
    space = directory / "space.toml"
    space.write_text(
        f'keys = ["bf16", "e4m3", "e2m1", "int4"]\nqueries = ["{directory}/dies.py:dies"]\nprefixes = ["", "qat+"]\n'
    )
    fields = {"checkpoint": mini, "space": str(space), "rows": 32, "halvings": 1, "device": "cpu"}
    return SweepOptions(**(fields | changes))


def test_a_killed_worker_changes_nothing(mini, tmp_path, cluster):
    """Same records in the same order as a local sweep, each of them once, although a process died at its work."""
    todo = plan(options(mini, tmp_path, executor="ray", run_dir=tmp_path / "ray"))
    found = execute(todo, lambda line: None)
    assert (tmp_path / "died").exists()
    places = [line.split() for line in (tmp_path / "places").read_text().splitlines()]
    assert len({pid for pid, _ in places}) >= 3  # the one that died, and one on each node
    assert len({node for _, node in places}) == 2
    local = execute(plan(options(mini, tmp_path, run_dir=tmp_path / "local")), lambda line: None)
    assert (tmp_path / "ray" / RECORDS).read_text() == (tmp_path / "local" / RECORDS).read_text()
    keys = [json.loads(line)["key"] for line in (tmp_path / "ray" / RECORDS).read_text().splitlines()[1:]]
    assert len(keys) == len(set(keys)) == local.measured_cases == found.measured_cases
    assert np.array_equal(found.recall.values, local.recall.values, equal_nan=True)


def test_what_a_task_refuses_is_said_as_it_would_be_here(mini, tmp_path, cluster):
    space = tmp_path / "space.toml"
    asked = options(mini, tmp_path, executor="ray", layers=[2], halvings=0)
    space.write_text(f'keys = ["{tmp_path}/dies.py:fails"]\n')
    with pytest.raises(InputError, match=r"^format .*dies.py:fails: encode fails: ValueError: not today$"):
        execute(plan(asked), lambda line: None)


def test_what_is_not_there(monkeypatch):
    monkeypatch.setattr(executors, "present", lambda package: False)
    with pytest.raises(EnvironmentMissing, match=r"pip install 'diffcheck\[ray\]'"):
        executors.make_executor("ray", "cpu")
    with pytest.raises(InputError, match="--executor: 'slurm', expected local or ray"):
        executors.make_executor("slurm", "cpu")


def test_a_cluster_without_gpus_says_so(mini, tmp_path, cluster):
    asked = options(mini, tmp_path, executor="ray", device="cuda", layers=[2])
    with pytest.raises(EnvironmentMissing, match="--executor ray: the cluster has no GPU slot"):
        execute(plan(asked), lambda line: None)


def test_nobody_at_the_address(monkeypatch):
    pytest.importorskip("ray", reason="needs Ray: pip install 'diffcheck[ray]'")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(EnvironmentMissing, match=r"no cluster at RAY_ADDRESS 127.0.0.1:1"):
        executors.make_executor("ray", "cpu")
