"""What is measured once of a GPU: how far apart events around nothing and next to nothing lie, and what its memory reaches.

Kept in the store for a card, a driver and a start of the host, so the first oracle that asks measures for all.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from sandbox.build import BuildUnavailable
from sandbox.build.artifacts import ArtifactStore
from sandbox.jail import nvml
from sandbox.jail.device_cuda import physical_index
from sandbox.jail.faults import JailError, ZygoteLost
from sandbox.jail.limits import Limits
from sandbox.jail.spawn import Zygote
from sandbox.oracle.gpu import NO_CALL, ONE_CALL, CallTimes, measure_call_times, runner_environment
from sandbox.oracle.roofline import Bandwidth, measure_bandwidth

GAP_MEMORY_BYTES = 8 << 30


class CardFacts:
    """Facts of the GPUs that one oracle judges on.

    Args:
      store: keeps them.
      scratch: for temporary files.
      gpu_zygote: forks the runner that calls nothing.
    """

    def __init__(self, store: ArtifactStore, scratch: Path, gpu_zygote: Callable[[], Zygote]):
        self._store, self._scratch, self._gpu_zygote = store, scratch, gpu_zygote
        self._call_times: dict[str, CallTimes] = {}
        self._bandwidths: dict[str, Bandwidth] = {}

    def call_times(self, device: str) -> CallTimes:
        """What a flushed call's span holds beyond the device's work, and what the least call takes (`measure_call_times`); 0 on a CPU.

        Measured once for a card, a driver and a start of this host, by the first oracle that asks; the caller has
        the device to itself.

        Raises:
          BuildUnavailable: it cannot be measured.
        """
        if device == "cpu":
            return CallTimes(0.0, 0.0)
        if device not in self._call_times:
            facts = self.found_once(device, ("call times 1", NO_CALL, ONE_CALL), lambda: asdict(self._measure_call_times(device)))
            self._call_times[device] = CallTimes(**facts)
        return self._call_times[device]

    def bandwidth(self, device: str) -> Bandwidth:
        """What a GPU's memory reaches; measured once like the gap of events, by this process, which has the device to itself.

        Raises:
          BuildUnavailable: it cannot be measured.
        """
        if device not in self._bandwidths:
            try:
                facts = self.found_once(device, ("bandwidth 1",), lambda: asdict(measure_bandwidth(device)))
            except RuntimeError as error:
                raise BuildUnavailable(f"the memory of {device} cannot be timed: {error}") from error
            self._bandwidths[device] = Bandwidth(**facts)
        return self._bandwidths[device]

    def found_once(self, device: str, what: tuple[str, ...], measure: Callable[[], dict]) -> dict:
        """Facts of a card that go to JSON, kept for this card, driver and start of the host. Raises what `measure` does."""
        gpu = nvml.gpu(physical_index(device))
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        key = self._store.key(boot, device, gpu.name, gpu.driver, *what)
        found = self._store.find(key)
        if found is not None:
            return json.loads(found.read_text())
        facts = measure()
        with tempfile.NamedTemporaryFile("w", dir=self._scratch, suffix=".json") as file:
            file.write(json.dumps(facts))
            file.flush()
            self._store.publish(key, Path(file.name))
        return facts

    def _measure_call_times(self, device: str) -> CallTimes:
        limits = Limits(memory_bytes=None, open_files=4096, gpu=True)
        env = runner_environment()
        try:
            with self._gpu_zygote().runner(limits, GAP_MEMORY_BYTES, env=env) as runner:
                return measure_call_times(runner.call, device)
        except ZygoteLost:
            raise
        except (JailError, ValueError) as error:
            raise BuildUnavailable(f"the events of {device} cannot be timed: {error}") from error
