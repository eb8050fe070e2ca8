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
        zones = sorted(_POWERCAP.glob("intel-rapl:*"))  # AMD's have the same name
        packages = [zone for zone in zones if _text(zone / "name").startswith("package")]
        for zone in packages:
            file, wrap = zone / "energy_uj", _text(zone / "max_energy_range_uj")
            if not (_text(file) and wrap):
                self._counters.clear()
                return f"{file} must not be read (root may allow it: chmod a+r)"
            self._counters.append((partial(_count, file), int(wrap) + 1))
        return f"RAPL, packages: {len(packages)}" if packages else f"no RAPL in {_POWERCAP}"

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


def _count(file: Path) -> int:
    return int(file.read_text())


def _text(file: Path) -> str:
    """The content of a file; nothing of one that is not there or must not be read."""
    try:
        return file.read_text()
    except OSError:
        return ""
