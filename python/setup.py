"""Sets the tag of the wheel. Everything else is in pyproject.toml."""

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel

# The bundled library and program need glibc 2.28. .ci/wheel compiles them for it, and auditwheel checks them.
PLATFORM = "manylinux_2_28_x86_64"


class WithBinaries(Distribution):
    """The wheel contains machine code, so it is installed into platlib, not purelib."""

    def has_ext_modules(self) -> bool:
        return True


class AnyPython(bdist_wheel):
    """ctypes loads the library, so one wheel works with every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", PLATFORM


setup(distclass=WithBinaries, cmdclass={"bdist_wheel": AnyPython})
