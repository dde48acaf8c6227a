"""The command line: an error of ours is one panel and an exit code; light commands stay light."""

import subprocess
import sys

import pytest

from flows.cli import FAILURE, MISTAKE, main
from storage.filesystem import open_store
from storage.layout import RunLayout
from storage.manifests import ManifestLog

LOOKING = ("runs", "show", "diff", "prune", "fork", "query")
RUNNING = ("train", "demo", "chaos", "up", "down")
ASKING = ("snapshots", "checkpoint", "verify", "trace", "report", "audit", "restore-plan")
COMMANDS = (*RUNNING, *ASKING, "config-reference", *LOOKING)
HEAVY = ("prefect", "ray", "torch", "vllm", "transformers", "matplotlib", "plotly")


@pytest.fixture
def run_main(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("MIDFLIGHT_HOME", str(tmp_path / "home"))

    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        shown = capsys.readouterr()
        return int(ended.value.code or 0), " ".join((shown.out + shown.err).replace("│", " ").split())

    return run


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_with_an_example(run_main, command):
    code, shown = run_main(command, "--help")
    assert code == 0
    assert f"midflight {command}" in shown.split("Example", 1)[1]


def test_a_mistake_in_the_configuration_exits_with_two_and_no_traceback(run_main, tmp_path):
    (tmp_path / "run.yaml").write_text("name: run\nmax_step: 3\n")
    code, shown = run_main("train", str(tmp_path / "run.yaml"))
    assert code == MISTAKE
    assert "unknown key 'max_step'; did you mean 'algorithm.max_steps'?" in shown
    assert "Traceback" not in shown


def test_a_checkpoint_of_a_run_that_is_not_live_is_a_mistake(run_main, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    code, shown = run_main("checkpoint", "nobody")
    assert code == MISTAKE
    assert "run 'nobody' is not live: no services run for" in shown


def test_an_unknown_run_exits_with_one(run_main):
    for command in ("snapshots", "verify", "trace", "audit", "restore-plan"):
        code, shown = run_main(command, "nobody")
        assert code == FAILURE
        assert "holds no run 'nobody'" in shown


def test_a_store_that_cannot_be_written_is_refused_before_anything_is_started(run_main, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "run.yaml").write_text(f"name: run\nstore: {{url: {tmp_path}/file/store}}\n")
    code, shown = run_main("train", str(tmp_path / "run.yaml"))
    assert code == FAILURE
    assert "StoreUnsuitable" in shown
    assert not (tmp_path / "home" / "services").exists()


@pytest.mark.parametrize("setting", ["data.task=sort9", "policy.model=/no/model", "store.url=nowhere://bucket"])
def test_an_unknown_task_model_or_scheme_of_a_store_is_refused_before_anything_is_started(run_main, tmp_path, setting):
    (tmp_path / "run.yaml").write_text("name: run\n")
    code, shown = run_main("train", str(tmp_path / "run.yaml"), "--set", setting)
    assert code == MISTAKE
    assert setting.split("=")[1] in shown
    assert not (tmp_path / "home" / "services").exists()


def test_a_run_that_only_claimed_its_log_can_be_looked_at(run_main, tmp_path):
    ManifestLog(open_store(str(tmp_path / "home" / "store")), RunLayout("young"), "writer").claim()
    for command in ("snapshots", "verify", "trace"):
        with_no_error, shown = run_main(command, "young")
        assert with_no_error == 0, shown


def test_without_services_there_is_nothing_to_end(run_main):
    code, shown = run_main("down")
    assert code == 0
    assert "No services run" in shown


def test_the_command_line_loads_nothing_heavy():
    modules = (
        "flows.cli",
        "flows.train_command",
        "flows.demo",
        "flows.inspect_command",
        "flows.audit_command",
        "flows.restore_plan_command",
        "flows.local_services",
        "flows.store_commands",
    )
    program = (
        f"import sys, {', '.join(modules)}\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
