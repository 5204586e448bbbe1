import ctypes
from types import SimpleNamespace

import pytest

from flashgen.tuning import device
from flashgen.tuning.device import Gpu, detect_gpu


class Driver:
    """libcuda as far as flashgen asks it, with one GPU or none."""

    def __init__(self, name="", major=0, minor=0):
        self.name, self.capability = name, {75: major, 76: minor}

    def cuInit(self, flags):
        return 0

    def cuDeviceGet(self, handle, ordinal):
        return 0 if self.name and ordinal == 0 else 100

    def cuDeviceGetName(self, buffer, size, handle):
        assert len(self.name) < size
        buffer.value = self.name.encode()
        return 0

    def cuDeviceGetAttribute(self, value, attribute, handle):
        value._obj.value = self.capability[attribute]
        return 0


@pytest.fixture(autouse=True)
def no_amd(monkeypatch, tmp_path):
    monkeypatch.setattr(device, "AMD_DRIVER", tmp_path / "kfd")


@pytest.mark.parametrize(
    "driver, gpu",
    [
        (Driver("NVIDIA H200", 9, 0), Gpu("NVIDIA H200", "sm_90")),
        (Driver("NVIDIA GeForce RTX 4090", 8, 9), Gpu("NVIDIA GeForce RTX 4090", "sm_89")),
        (Driver("NVIDIA B200", 10, 0), Gpu("NVIDIA B200", "sm_100")),
        (Driver(), None),
    ],
)
def test_an_nvidia_gpu(monkeypatch, driver, gpu):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert detect_gpu() == gpu


def test_no_driver(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert detect_gpu() is None


@pytest.mark.parametrize("hip, found", [("6.2", True), (None, False)])
def test_an_amd_gpu(monkeypatch, hip, found):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(device, "_nvidia", lambda: None)
    device.AMD_DRIVER.touch()
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = SimpleNamespace(name="AMD Instinct MI300X", gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert detect_gpu() == (Gpu("AMD Instinct MI300X", "gfx942") if found else None)
