"""Joules between readings, from counters as the kernel shows them."""

import pytest

from workbench.experiments.energy import EnergyMeter


def test_joules_are_those_of_all_packages_and_survive_a_counter_s_wrap(tmp_path, monkeypatch):
    monkeypatch.setattr("workbench.experiments.energy._POWERCAP", tmp_path)
    assert EnergyMeter().joules() is None
    assert EnergyMeter().source == f"no RAPL in {tmp_path}"

    def zone(name, kind, energy):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "name").write_text(f"{kind}\n")
        (tmp_path / name / "max_energy_range_uj").write_text("9999999\n")
        (tmp_path / name / "energy_uj").write_text(f"{energy}\n")

    for number, energy in enumerate((9_000_000, 1_000_000)):
        zone(f"intel-rapl:{number}", f"package-{number}", energy)
    zone("intel-rapl:0:0", "dram", 5)  # within its package's folder name: no package
    zone("intel-rapl:2", "psys", 5)  # the whole board: packages are in it
    meter = EnergyMeter()
    assert meter.source == "RAPL, packages: 2"
    zone("intel-rapl:0", "package-0", 500_000)  # once around
    zone("intel-rapl:1", "package-1", 3_000_000)
    zone("intel-rapl:2", "psys", 7_000_000)
    assert meter.joules() == pytest.approx(1.5 + 2.0)
    assert meter.joules() == 0
    for spoil in ("unlink", "touch"):  # as where only root reads it; a file of no content
        getattr(tmp_path / "intel-rapl:1" / "energy_uj", spoil)()
        assert EnergyMeter().joules() is None
        assert f"{tmp_path} cannot be read" in EnergyMeter().source
