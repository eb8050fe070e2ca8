"""The energy that runs use, where the machine tells it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

_POWERCAP = Path("/sys/class/powercap")


class EnergyMeter:
    """Joules between readings: of a GPU (NVML), or of the processor's packages (RAPL, memory's own
    counters left out). Whatever else runs there is in it.

    gpu: its UUID as NVML has it ("GPU-..."), else the processor. source: what is read, or why
    nothing can be.
    """

    def __init__(self, gpu: str = "") -> None:
        self._counters: list[tuple[Callable[[], int], int]] = []  # each in microjoules, its wrap
        self.source = self._open_gpu(gpu) if gpu else self._open_packages()
        self._last = self._counts()

    def joules(self) -> float | None:
        """Since the last reading, or since it was made; None where nothing can be read."""
        before, self._last = self._last, self._counts()
        if not self._counters:
            return None
        wraps = (wrap for _, wrap in self._counters)
        return 1e-6 * sum((new - old) % wrap for new, old, wrap in zip(self._last, before, wraps))

    def _counts(self) -> list[int]:
        return [counter() for counter, _ in self._counters]

    def _open_packages(self) -> str:
        try:
            for name in sorted(_POWERCAP.glob("intel-rapl:*/name")):  # AMD's are called the same
                if name.read_text().startswith("package"):
                    counter = partial(_number, name.with_name("energy_uj"))
                    counter()  # where only root reads it, this is told now
                    wrap = _number(name.with_name("max_energy_range_uj")) + 1
                    self._counters.append((counter, wrap))
        except (OSError, ValueError) as error:  # of a virtual machine one may be empty
            self._counters.clear()
            return f"{_POWERCAP} cannot be read: {error} (permission denied? as root: chmod a+r)"
        packages = len(self._counters)
        return f"RAPL, packages: {packages}" if packages else f"no RAPL in {_POWERCAP}"

    def _open_gpu(self, uuid: str) -> str:
        try:
            import pynvml  # noqa: PLC0415
        except ImportError:
            return "no NVML: pip install nvidia-ml-py"
        try:
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        except pynvml.NVMLError as error:
            return f"NVML tells no energy: {error}"
        read = pynvml.nvmlDeviceGetTotalEnergyConsumption  # millijoules
        self._counters.append((lambda: 1000 * read(handle), 2**64))
        return "NVML"


def _number(file: Path) -> int:
    return int(file.read_text())
