"""A Harbor environment that is a sandbox on this machine: no container engine, no image, no network but the endpoint.

The task's Dockerfile is followed as far as it goes without a network, over the host's programs or over a root file system that the user
names; ``FROM`` is not looked at. Commands run as the user who is root inside, whoever is asked for.
"""

from pathlib import Path, PurePosixPath
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult, SandboxBuildFailedError
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.models.task.config import NetworkPolicy

from skyrl_async.harbor.runner.dockerfile import CannotBuildError, Copy, Run, steps
from skyrl_async.harbor.runner.sandbox import Limits, Sandbox, SandboxError

_RESERVED = ("/logs", "/tests")
"""The verifier's directories: an agent that fills its disk is judged all the same."""
_unbuildable: dict[Path, str] = {}
"""Dockerfiles that could not be followed, and why: they are not tried again."""


class LocalEnvironment(BaseEnvironment):
    """One sandbox. Harbor's protocol: ``start``, ``exec``, uploads and downloads, ``stop``."""

    def __init__(
        self,
        *args: Any,
        base: str,
        root_dir: str | None = None,
        memory_mb: int = 2048,
        disk_mb: int = 1024,
        max_processes: int = 256,
        read_only: list[tuple[str, str]] | None = None,
        forwarded: list[tuple[int, str, int]] | None = None,
        path_prefix: str = "",
        **kwargs: Any,
    ) -> None:
        """
        Args:
            base: directory that the sandbox hides behind its own file system.
            root_dir: root file system; None: the host's programs.
            memory_mb, disk_mb, max_processes: limits where the task names none.
            read_only: directories of the host and where they are seen.
            forwarded: port inside, host and port outside.
            path_prefix: directories before the others of ``PATH``, each with a colon.
            args, kwargs: Harbor's.
        """
        super().__init__(*args, **kwargs)
        config = self.task_env_config
        self._limits = Limits(
            memory_mb=config.memory_mb or memory_mb,
            disk_mb=config.storage_mb or disk_mb,
            max_processes=max_processes,
        )
        self._base = Path(base)
        self._root_dir = None if root_dir is None else Path(root_dir)
        self._read_only = [(Path(source), target) for source, target in read_only or ()]
        self._forwarded = {port: (host, there) for port, host, there in forwarded or ()}
        self._path_prefix = path_prefix
        self._sandbox: Sandbox | None = None
        self._workdir = "/"
        self._image_env: dict[str, str] = {}

    @staticmethod
    def type() -> str:
        return "local"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True, dynamic_network_policy=True)

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(memory_limit=True, fractional_cpus=True, cpu_request=True)

    def _validate_definition(self) -> None:
        if self.task_env_config.docker_image and self._root_dir is None and not self._dockerfile.exists():
            self.logger.debug("the image %s is replaced by the host's programs", self.task_env_config.docker_image)
        if (self.environment_dir / "docker-compose.yaml").exists():
            raise SandboxBuildFailedError(
                "docker-compose.yaml needs a container engine; see generator.harbor.environment"
            )

    def validate_network_policy_support(self, network_policy: NetworkPolicy | None = None) -> None:
        """Every policy is accepted: there is no network, whatever a task would allow."""

    async def _apply_network_policy(self, network_policy: NetworkPolicy) -> None:
        """Nothing to change: there is no network."""

    @property
    def _dockerfile(self) -> Path:
        path: Path = self.environment_dir / "Dockerfile"
        return path

    async def start(self, force_build: bool) -> None:
        """Make the sandbox and follow the Dockerfile until Harbor's ``build_timeout_sec``. Raises its ``SandboxBuildFailedError``."""
        if (why := _unbuildable.get(self._dockerfile)) is not None:
            raise SandboxBuildFailedError(why)
        try:
            self._sandbox = await Sandbox.start(
                self._base,
                self._limits,
                root_dir=self._root_dir,
                read_only=self._read_only,
                reserved=_RESERVED,
                forwarded=self._forwarded,
            )
            if self._dockerfile.exists():
                await self._build(self._sandbox)
            else:
                await self._upload_environment_dir_after_start()
        except CannotBuildError as error:
            why = _unbuildable[self._dockerfile] = f"{self.environment_name}: its image cannot be built here: {error}"
            raise SandboxBuildFailedError(why) from error
        except SandboxError as error:
            raise SandboxBuildFailedError(str(error)) from error
        if self.task_env_config.workdir:
            self._workdir = self.task_env_config.workdir
        made = ("/logs/agent", "/logs/verifier", "/logs/artifacts", self._workdir)
        await self._sandbox.run(["/bin/mkdir", "-p", *made])

    async def _build(self, sandbox: Sandbox) -> None:
        for step in steps(self._dockerfile):
            self._workdir = step.workdir
            await sandbox.run(["/bin/mkdir", "-p", step.workdir])
            if isinstance(step.action, Copy):
                for source in step.action.sources:
                    await sandbox.put(source, step.action.target, step.action.mode)
            elif isinstance(step.action, Run):
                done = await sandbox.run(step.action.argv, cwd=step.workdir, env=step.env)
                if done.status != 0:
                    words = (done.error or done.output).decode(errors="replace").strip().splitlines()
                    raise CannotBuildError(
                        f"{step.line!r} ended with {done.status}, without a network: {words[-1] if words else ''}"
                    )
            else:
                self._image_env = step.env

    async def stop(self, delete: bool) -> None:
        """End the sandbox; nothing of it can be kept."""
        if self._sandbox is not None:
            await self._sandbox.close()
            self._sandbox = None

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run ``command`` with bash."""
        given = {**self._image_env, **(self._merge_env(env) or {})}
        if self._path_prefix:
            given["PATH"] = self._path_prefix + given.get("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin")
        done = await self._running().run(
            ["/bin/bash", "-c", command], cwd=cwd or self._workdir, env=given, timeout_s=timeout_sec
        )
        if done.is_late:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds: {command[:200]}")
        output, error = (text.decode(errors="replace") for text in (done.output, done.error))
        if (callback := self._output_callback()) is not None and output:
            await callback(output, "stdout")
        return ExecResult(stdout=output, stderr=error, return_code=done.status)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._running().put(Path(source_path), target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._running().put(Path(source_dir), target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await self._running().get(str(PurePosixPath(source_path)), Path(target_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self._running().get(str(PurePosixPath(source_dir)), Path(target_dir))

    def _running(self) -> Sandbox:
        if self._sandbox is None:
            raise SandboxError("the sandbox is not running")
        return self._sandbox
