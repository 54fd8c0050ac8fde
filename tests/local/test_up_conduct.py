"""How `octavo up` keeps its processes: start, edits, crashes, and an end that leaves nothing behind."""

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from local.watched_up import File, Up, alive, until

Started = Callable[..., Up]


def test_once_shows_each_stage_then_the_answer_and_leaves_with_status_0(
    started: Started, manifest: File
) -> None:
    manifest.write(replicas=2, args=("--max-queue=50",))
    up = started("-f", str(manifest.path), "--once")
    rest = "\n".join(up.rest())
    assert up.process.returncode == 0, rest
    for name in ("tiny-engine-0", "tiny-engine-1"):
        stages = [line.split(": ", 1)[1] for line in rest.splitlines() if f"{name}: " in line]
        assert stages[0].startswith("starting on ") and stages[1:] == [
            "loading weights llama",
            "sizing the cache",
            "warming",
            "ready",
        ]
    assert rest.index("fetching") < rest.index("starting on")
    assert f"endpoint: http://127.0.0.1:{up.port}/v1" in rest and "model:    tiny" in rest
    assert f"curl http://127.0.0.1:{up.port}/v1/chat/completions" in rest and "from openai import" in rest
    assert "\nParis.\n" in rest and "time to first token" in rest and "2 tokens" in rest


def test_ctrl_c_ends_every_process(started: Started, manifest: File) -> None:
    manifest.write(replicas=2)
    up = started("-f", str(manifest.path))
    up.line("serving until Ctrl-C")
    below = up.children()
    assert len(below) == 3
    assert up.interrupt() == 0
    assert alive(below) == []


def test_ctrl_c_while_starting_ends_every_process(started: Started, manifest: File) -> None:
    manifest.write(args=("--max-queue=100000",))
    up = started("-f", str(manifest.path))
    up.line("loading weights")
    below = up.children()
    assert up.interrupt() == 130
    assert alive(below) == []


def test_a_killed_up_leaves_no_process(started: Started, manifest: File) -> None:
    manifest.write(replicas=2)
    up = started("-f", str(manifest.path))
    up.line("serving until Ctrl-C")
    below = up.children()
    up.process.kill()
    until(lambda: not alive(below))


def test_replicas_follow_the_manifest_while_it_runs(started: Started, manifest: File) -> None:
    manifest.write(replicas=2)
    up = started("-f", str(manifest.path), cores=1)  # so that the share of the cores stays as it is
    up.line("serving until Ctrl-C")
    first = up.names()
    manifest.write(replicas=3)
    up.line(r"replicas 2 -> 3")
    up.line(r"tiny-engine-2: ready")
    until(lambda: up.names() == [*first, "tiny-engine-2"])
    manifest.write(replicas=1)
    up.line(r"replicas 3 -> 1")
    up.line(r"tiny-engine-[12]: gone")
    up.line(r"tiny-engine-[12]: gone")
    assert up.names() == ["tiny-engine-0"] and len(up.children()) == 2


def test_changed_flags_replace_the_engines_without_a_moment_of_none(started: Started, manifest: File) -> None:
    manifest.write(replicas=1)
    up = started("-f", str(manifest.path))
    up.line("serving until Ctrl-C")
    manifest.write(replicas=1, args=("--max-num-seqs=9",))
    up.line("the engine's settings changed")
    up.line("tiny-engine-1: ready")
    up.line("tiny-engine-0: stopping")
    up.line("tiny-engine-0: gone")
    assert up.names() == ["tiny-engine-1"]
    assert b"--max-num-seqs=9" in Path(f"/proc/{up.pid_of('tiny-engine-1')}/cmdline").read_bytes()


def test_a_broken_edit_is_said_in_one_line_and_changes_nothing(started: Started, manifest: File) -> None:
    manifest.write(replicas=1)
    up = started("-f", str(manifest.path))
    up.line("serving until Ctrl-C")
    below = up.children()
    manifest.write(replicas=1, router={"policy": "lucky"})
    assert "spec.router.policy" in up.line("the edit is not applied")
    manifest.write(replicas=1, model={"uri": "file:///nowhere/m.gguf"})
    assert "/nowhere/m.gguf" in up.line("the edit is not applied")
    manifest.write(replicas=1, paused=True)
    assert "hands off" in up.line("the edit is not applied")
    assert up.children() == below and up.names() == ["tiny-engine-0"]
    manifest.write(replicas=2)
    up.line("tiny-engine-1: ready")


def test_settings_that_cannot_start_leave_the_old_engine_and_are_said(
    started: Started, manifest: File
) -> None:
    manifest.write(replicas=1)
    up = started("-f", str(manifest.path))
    up.line("serving until Ctrl-C")
    manifest.write(replicas=1, args=("--max-num-seqs=13",))
    up.line("tiny-engine-1: max-num-seqs is 13: these engines are superstitious")
    assert up.names() == ["tiny-engine-0"]
    manifest.write(replicas=1)
    up.line("tiny-engine-1: gone")
    assert up.names() == ["tiny-engine-0"]


def test_a_crashed_engine_is_said_and_started_again(started: Started, manifest: File) -> None:
    manifest.write(replicas=1)
    up = started("-f", str(manifest.path))
    up.line("serving until Ctrl-C")
    os.kill(up.pid_of("tiny-engine-0"), signal.SIGKILL)
    up.line("tiny-engine-0 was killed by SIGKILL")
    until(lambda: up.names() == [])
    up.line("tiny-engine-0: starting again")
    up.line("tiny-engine-0: ready")
    until(lambda: up.names() == ["tiny-engine-0"])


def test_a_new_policy_restarts_the_router_on_the_same_port(started: Started, manifest: File) -> None:
    manifest.write(replicas=1)
    up = started("-f", str(manifest.path))
    up.line("serving until Ctrl-C")
    (old,) = set(up.children()) - {up.pid_of("tiny-engine-0")}
    manifest.write(replicas=1, router={"policy": "round-robin"})
    up.line("the router's settings changed")

    def replaced() -> bool:
        routers = set(up.children()) - {up.pid_of("tiny-engine-0"), old}
        return any(b"--policy=round-robin" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in routers)

    until(replaced)


def test_an_engine_that_cannot_start_at_first_ends_it_with_that_line(
    started: Started, manifest: File
) -> None:
    manifest.write(replicas=2, args=("--max-num-seqs=13",))
    up = started("-f", str(manifest.path))
    assert up.rest()[-1].startswith("octavo: tiny-engine-") and "superstitious" in up.lines[-1]
    assert up.process.returncode == 1


def test_a_port_in_use_gets_one_line(started: Started, manifest: File, port: int) -> None:
    manifest.write()
    with socket.create_server(("127.0.0.1", port)):
        up = started("-f", str(manifest.path))
        (line,) = up.rest()
    assert f"port {port} is in use" in line and "choose another with --port" in line
    assert up.process.returncode == 2


def test_a_second_run_on_the_port_is_refused_and_the_first_serves_on(
    started: Started, manifest: File, port: int
) -> None:
    manifest.write()
    first = started("-f", str(manifest.path))
    first.line("serving until Ctrl-C")
    second = started("-f", str(manifest.path))
    assert f"octavo: port {port} is in use" in second.rest()[-1]
    assert first.names() == ["tiny-engine-0"] and first.process.poll() is None


def test_it_runs_again_after_an_end(started: Started, manifest: File) -> None:
    manifest.write()
    for _ in range(2):
        up = started("-f", str(manifest.path), "--once")
        up.rest()
        assert up.process.returncode == 0, up.lines


def test_a_model_that_is_not_there_gets_one_line(started: Started, manifest: File) -> None:
    manifest.write(model={"uri": "file:///nowhere/m.gguf"})
    up = started("-f", str(manifest.path))
    assert [line for line in up.rest() if line.startswith("octavo: ")] == [
        "octavo: file:///nowhere/m.gguf: there is no file or folder /nowhere/m.gguf"
    ]
    assert up.process.returncode == 1


def test_a_wrong_manifest_gets_one_line_that_names_the_field(started: Started, manifest: File) -> None:
    manifest.write(autoscaling={"maxReplicas": 2})
    up = started("-f", str(manifest.path))
    (line,) = up.rest()
    assert "spec.replicas: replicas beside native autoscaling" in line and str(manifest.path) in line
    assert up.process.returncode == 2
    up = started("-f", "/nowhere.yaml")
    assert up.rest() == ["octavo: /nowhere.yaml: the manifest cannot be read: No such file or directory"]


def test_keys_come_from_a_folder_where_there_is_no_secret(
    started: Started, manifest: File, tmp_path: Path
) -> None:
    manifest.write(auth={"apiKeySecretRef": {"name": "keys"}})
    up = started("-f", str(manifest.path), "--once")
    assert "--api-key-dir" in up.rest()[-1] and up.process.returncode == 2
    (tmp_path / "keys").mkdir()
    up = started("-f", str(manifest.path), "--once", f"--api-key-dir={tmp_path / 'keys'}")
    assert "holds no key" in up.rest()[-1] and up.process.returncode == 2
    (tmp_path / "keys" / "one").write_text("secret-1\n")
    up = started("-f", str(manifest.path), "--once", f"--api-key-dir={tmp_path / 'keys'}")
    assert any("Authorization: Bearer secret-1" in line for line in up.rest()), up.lines
    assert up.process.returncode == 0


def test_autoscaling_follows_the_queue_within_its_bounds(started: Started, manifest: File) -> None:
    waiting = ("--max-num-batched-tokens=40", "--max-num-seqs=4")
    manifest.write(None, waiting, autoscaling={"minReplicas": 1, "maxReplicas": 3})
    up = started("-f", str(manifest.path))
    up.line("serving until Ctrl-C")
    assert "maxReplicas is 3" in up.line("autoscaling: replicas 1 -> 3")
    until(lambda: len(up.names()) == 3)
    manifest.write(replicas=1, args=waiting)
    up.line("replicas 3 -> 1")
    until(lambda: len(up.names()) == 1)
