"""A whole Flower deployment on this machine, in one folder, over TLS and with keys.

    with Deployment(folder) as deployment:
        deployment.start_superlink()
        deployment.register("client-0")
        deployment.start_supernode("client-0", {"partition-id": 0})
        run = deployment.start_run(app, {"num-server-rounds": 4})
        assert run.wait(300) == "finished:completed"

Leaving the block stops every process that was started in it, and everything these
started, also after an error or Ctrl-C. Nothing is installed and nobody is called.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from identities import make_client_key, make_server_certificate

Value = str | int | float | bool
Process = subprocess.Popen[bytes]
Found = TypeVar("Found")

_MARK = "FASTFEDUL_DEPLOYMENT"
_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}
_SESSION = 120.0
"""Seconds to keep trying a SuperNode: its old session lapses after about 70."""


class DeploymentError(RuntimeError):
    """A part of the deployment did not do what it should; the message names a log."""


class Run:
    """A run that was handed to the SuperLink, and its log."""

    def __init__(
        self, deployment: Deployment, link: str, process: Process, log: Path
    ) -> None:
        self._deployment = deployment
        self._link = link
        self.process = process
        self.log = log

    @property
    def number(self) -> str:
        """The number Flower gave the run, once it has one."""

        def find() -> str | None:
            words = self.log.read_text("utf-8", "replace").split("started run ")
            return words[1].split()[0] if len(words) > 1 else None

        return self._deployment.wait_for(find, 60, f"the run to start; see {self.log}")

    def wait(self, seconds: float) -> str:
        """Return how the run ended, such as `finished:completed`.

        Raises:
            DeploymentError: If it has not ended after so many seconds.
        """
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise DeploymentError(
                f"the run has not ended after {seconds:g} s; see {self.log}"
            ) from None
        return self.status()

    def status(self) -> str:
        """Return how it stands with the run."""
        found = self._deployment.flwr(
            "list", self._link, "--run-id", self.number, "--format", "json"
        )
        return str(found["runs"][0]["status"])


class Deployment:
    """A SuperLink and SuperNodes that live as long as a `with` block."""

    def __init__(
        self,
        folder: Path,
        *,
        environment: Mapping[str, str] | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Describe a deployment; nothing is started yet.

        Args:
            folder: Where keys, logs, Flower's own files and its database go.
            environment: Variables for every process, beside those of this one.
            say: Called with a line of progress.
        """
        self.folder = folder.resolve()
        self.database = self.folder / "state.db"
        self.address = ""
        self.nodes: dict[str, Process] = {}
        self._say = say
        self._mark = secrets.token_hex(16)
        self._processes: list[Process] = []
        self._keys: dict[str, Path] = {}
        self._settings: dict[str, Mapping[str, Value]] = {}
        # Flower starts its parts by name.
        bin_folder = str(Path(sys.executable).parent)
        self.environment = {
            **os.environ,
            **_QUIET,
            **(environment or {}),
            "FLWR_HOME": str(self.folder / "flwr"),
            "PATH": os.pathsep.join((bin_folder, os.environ.get("PATH", ""))),
            _MARK: self._mark,
        }

    def __enter__(self) -> Deployment:
        for name in ("flwr", "keys", "logs"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        if not (self.folder / "keys" / "ca.crt").exists():
            make_server_certificate(self.folder / "keys")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start_superlink(self, seconds: float = 90) -> None:
        """Start the SuperLink and return when it answers.

        A second call, after it was stopped or killed, gives it the same port and
        database again.
        """
        keys = self.folder / "keys"
        if not self.address:
            self.address = f"127.0.0.1:{free_port()}"
            (self.folder / "flwr" / "config.toml").write_text(
                '[superlink]\ndefault = "link"\n\n[superlink.link]\n'
                f"address = {json.dumps(self.address)}\n"
                f"root-certificates = {json.dumps(str(keys / 'ca.crt'))}\n",
                "utf-8",
            )
        host, port = self.address.split(":")
        self._say(f"SuperLink on {self.address}, TLS, SuperNodes need a known key")
        link, log = self._start(
            "superlink",
            *("flower-superlink", "--host", host, "--port", port),
            *("--ssl-ca-certfile", str(keys / "ca.crt")),
            *("--ssl-certfile", str(keys / "server.pem")),
            *("--ssl-keyfile", str(keys / "server.key")),
            *("--enable-supernode-auth", "--database", str(self.database)),
        )
        self.superlink = link
        trust = ssl.create_default_context(cafile=str(keys / "ca.crt"))

        def healthy() -> bool:
            if link.poll() is not None:
                raise DeploymentError(f"the SuperLink ended; see {log}")
            with contextlib.suppress(urllib.error.URLError, OSError):
                url = f"https://{self.address}/health"
                with urllib.request.urlopen(url, timeout=5, context=trust) as answer:
                    return bool(answer.status == 200)
            return False

        self.wait_for(healthy, seconds, f"the SuperLink to answer; see {log}")

    def make_key(self, name: str) -> Path:
        """Make the key of a SuperNode and return its public part."""
        private = self.folder / "keys" / f"node-{len(self._keys)}"
        self._keys[name] = private
        return make_client_key(private)

    def register(self, name: str) -> int:
        """Let the SuperLink know a SuperNode by name and key; return its node id."""
        public = self.make_key(name)
        found = self.flwr(
            *("supernode", "register", str(public), "link"),
            *("--name", name, "--format", "json"),
        )
        self._say(f"registered {name}")
        return int(found["node-id"])

    def start_supernode(
        self,
        name: str,
        config: Mapping[str, Value] | None = None,
        *,
        patience: float = _SESSION,
    ) -> float:
        """Start the SuperNode of a client and return when the SuperLink took it in.

        A SuperNode that was killed is refused until its old session has lapsed, so it
        is tried again and again.

        Args:
            name: As it was registered.
            config: What its ClientApp finds in `context.node_config`; by default as
                before.
            patience: For how many seconds to try. With 0 it is tried once.

        Returns:
            How many seconds it took.

        Raises:
            DeploymentError: If the SuperLink does not take it in.
        """
        settings = self._settings.get(name, {}) if config is None else config
        self._settings[name] = settings
        began = time.monotonic()
        while True:
            process, log = self._start(
                self._keys[name].name,
                "flower-supernode",
                *("--superlink", self.address, "--port", str(free_port())),
                *("--root-certificates", str(self.folder / "keys" / "ca.crt")),
                *("--auth-supernode-private-key", str(self._keys[name])),
                *("--node-config", _as_toml(settings)),
            )
            self.nodes[name] = process

            def outcome(process: Process = process, log: Path = log) -> str | None:
                if "SuperNode ID:" in log.read_text("utf-8", "replace"):
                    return "taken in"
                return None if process.poll() is None else "refused"

            found = self.wait_for(outcome, 90, f"the SuperNode {name}; see {log}")
            waited = time.monotonic() - began
            if found == "taken in":
                self._say(f"SuperNode {name} is online after {waited:.0f} s")
                return waited
            if waited >= patience:
                raise DeploymentError(f"the SuperNode {name} was refused; see {log}")
            time.sleep(2)

    def start_run(self, app: Path, config: Mapping[str, Value] | None = None) -> Run:
        """Hand an app to the SuperLink and follow its log."""
        command = ["flwr", "run", str(app), "link", "--stream"]
        if config:
            command += ["--run-config", _as_toml(config)]
        return Run(self, "link", *self._start("run", *command))

    def start_simulation(
        self, app: Path, num_clients: int, config: Mapping[str, Value] | None = None
    ) -> Run:
        """Run an app with simulated clients; needs no SuperLink or SuperNodes of ours.

        Flower starts a SuperLink for it that would stay; `stop` ends it too.
        """
        port = "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"
        self.environment.setdefault(port, str(free_port()))
        command = ["flwr", "run", str(app), "local", "--stream", "--federation-config"]
        size = {"num-supernodes": num_clients, "client-resources-num-cpus": 1}
        command.append(_as_toml(size))
        if config:
            command += ["--run-config", _as_toml(config)]
        return Run(self, "local", *self._start("simulation", *command))

    def count_messages(self, name: str) -> int:
        """Return how often the SuperNode of a client was told to train."""
        logs = (self.folder / "logs").glob(f"{self._keys[name].name}.*.log")
        texts = (log.read_text("utf-8", "replace") for log in logs)
        return sum(text.count("Receiving: train message") for text in texts)

    def kill(self, process: Process) -> None:
        """End a process with SIGKILL, as a power cut would."""
        process.kill()
        process.wait()

    def terminate(self, process: Process, seconds: float = 30) -> None:
        """Ask a process to end, and wait until it has."""
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill(process)

    def stop(self) -> None:
        """End everything that was started: politely, then for good."""
        running = [p for p in reversed(self._processes) if p.poll() is None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + 10
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
        # Flower's parts live on for a while, some in sessions of their own.
        while self.pids():
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in running:
                process.poll()
            time.sleep(0.05)
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def pids(self) -> list[int]:
        """Return the processes of this deployment that are alive, children included.

        All carry a mark in their environment. Without /proc there are none to find,
        and `stop` relies on process groups.
        """
        mark = f"{_MARK}={self._mark}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in entry.read_bytes().split(b"\0"):
                    found.append(int(entry.parent.name))
        return found

    def flwr(self, *arguments: str) -> dict[str, Any]:
        """Return what a command of Flower answers as JSON."""
        done = subprocess.run(
            ("flwr", *arguments),
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
        )
        try:
            found = json.loads(done.stdout)
        except ValueError:
            found = {}
        if done.returncode or not found.get("success", bool(found)):
            words = " ".join((done.stdout + done.stderr).split())
            raise DeploymentError(f"flwr {arguments[0]} failed: {words[-500:]}")
        return dict(found)

    def wait_for(
        self, look: Callable[[], Found | None], seconds: float, what: str
    ) -> Found:
        """Return what `look` finds, as soon as it is more than None or False.

        Raises:
            DeploymentError: If it finds nothing for so many seconds.
        """
        deadline = time.monotonic() + seconds
        while not (found := look()):
            if time.monotonic() > deadline:
                raise DeploymentError(f"waited {seconds:g} s for {what}")
            time.sleep(0.1)
        return found

    def _start(self, name: str, program: str, *arguments: str) -> tuple[Process, Path]:
        log = self._new_log(name)
        with log.open("wb") as file:
            process = subprocess.Popen(
                (program, *arguments),
                env=self.environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)
        return process, log

    def _new_log(self, name: str) -> Path:
        number = 1
        while (log := self.folder / "logs" / f"{name}.{number}.log").exists():
            number += 1
        return log


def free_port() -> int:
    """Return a port of the loopback interface on which nobody listens.

    It lies below those that systems hand out for outgoing connections: while a server
    is down, nobody can get its port by chance, not even those who look for it.
    """
    while True:
        port = 15_000 + secrets.randbelow(15_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _as_toml(settings: Mapping[str, Value]) -> str:
    """Return settings as Flower's command line wants them."""
    return " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
