"""The compiled kernel is built once, privately, and its absence only costs time."""

import os
import stat
import sys

import pytest

from rd2h.errors import ConfigError, EngineError
from rd2h.offload import kernel as module
from rd2h.offload.kernel import build, cache_folder, compiler, load_kernel


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    load_kernel.cache_clear()
    monkeypatch.setenv("RD2H_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv(module.VARIABLE, raising=False)
    yield
    load_kernel.cache_clear()


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")


def test_it_is_built_once(tmp_path, monkeypatch):
    library = build(tmp_path / "cache", compiler(os.environ))
    assert stat.S_IMODE(library.stat().st_mode) == 0o700
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700
    assert [path.name for path in library.parent.iterdir()] == [library.name]
    monkeypatch.setattr(module.subprocess, "run", None)
    assert build(tmp_path / "cache", compiler(os.environ)) == library


def test_required_and_found(monkeypatch):
    monkeypatch.setenv(module.VARIABLE, "required")
    assert load_kernel() is not None


def test_off_means_numpy(monkeypatch):
    monkeypatch.setenv(module.VARIABLE, "off")
    assert load_kernel() is None


def test_without_a_compiler_numpy_does_it(no_compiler, caplog):
    assert load_kernel() is None
    assert "residency planning runs in NumPy" in caplog.text
    assert "no C compiler found" in caplog.text


def test_without_a_compiler_a_required_kernel_is_an_error(no_compiler, monkeypatch):
    monkeypatch.setenv(module.VARIABLE, "required")
    with pytest.raises(EngineError, match="RD2H_OFFLOAD_KERNEL=required, but the kernel cannot be built"):
        load_kernel()


def test_an_unknown_mode_is_an_error(monkeypatch):
    monkeypatch.setenv(module.VARIABLE, "fast")
    with pytest.raises(ConfigError, match="RD2H_OFFLOAD_KERNEL='fast' is not allowed"):
        load_kernel()


def test_a_compiler_that_fails_says_why(tmp_path):
    command = (sys.executable, "-c", "import sys; sys.exit('cannot compile')")
    with pytest.raises(EngineError, match="ended with 1: cannot compile"):
        build(tmp_path / "cache", command)
    assert list((tmp_path / "cache").iterdir()) == []
    with pytest.raises(EngineError, match="No such file"):
        build(tmp_path / "cache", ("/nowhere/cc",))


def test_code_that_others_could_have_written_is_not_loaded(tmp_path):
    library = build(tmp_path / "cache", compiler(os.environ))
    library.chmod(0o722)
    with pytest.raises(EngineError, match="writable by others"):
        build(tmp_path / "cache", compiler(os.environ))
    library.chmod(0o700)
    library.parent.chmod(0o777)
    with pytest.raises(EngineError, match="writable by others"):
        build(tmp_path / "cache", compiler(os.environ))


def test_a_cache_that_others_made_does_not_matter(tmp_path, monkeypatch):
    """The demo keeps its model there too, and in a user's own group most machines let the group write."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o775)
    monkeypatch.setenv(module.VARIABLE, "required")
    assert load_kernel() is not None


def test_without_a_home_numpy_does_it(monkeypatch, caplog):
    """A container whose user has no entry and no HOME."""

    def nobody(_):
        raise KeyError("uid not found")

    for name in ("RD2H_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert load_kernel() is None
    assert "RD2H_CACHE" in caplog.text


def test_a_compiler_that_cannot_be_parsed_is_named(monkeypatch, caplog):
    monkeypatch.setenv("CC", "gcc '-m64")
    assert load_kernel() is None
    assert 'CC="gcc \'-m64"' in caplog.text


def test_where_kernels_are_kept(tmp_path):
    assert cache_folder({"RD2H_CACHE": "/a"}).as_posix() == "/a/kernel"
    assert cache_folder({"XDG_CACHE_HOME": "/b"}).as_posix() == "/b/rd2h/kernel"
    assert cache_folder({}).parent.name == "rd2h"
    assert compiler({"CC": "ccache gcc -m64"}) == ("ccache", "gcc", "-m64")
