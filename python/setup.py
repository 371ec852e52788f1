"""Gives the wheel its tag. Everything else is in pyproject.toml."""

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel

# What the bundled library and program need of glibc; .ci/wheel compiles them for it, and auditwheel checks it.
PLATFORM = "manylinux_2_28_x86_64"


class WithBinaries(Distribution):
    """The wheel belongs into platlib, not purelib: it holds machine code."""

    def has_ext_modules(self) -> bool:
        return True


class AnyPython(bdist_wheel):
    """The library is loaded by ctypes, so one wheel fits every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", PLATFORM


setup(distclass=WithBinaries, cmdclass={"bdist_wheel": AnyPython})
