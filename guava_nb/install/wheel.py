"""A wheel made of the installed package itself: from a wheel, from a folder or editable, what runs here is what travels."""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath

from guava_nb.errors import ConfigError

__all__ = ["DISTRIBUTION", "Wheel", "build_wheel", "pack"]

DISTRIBUTION = "guava-nb"
_PACKAGE = Path(__file__).resolve().parents[1]
#: What of the installed metadata goes along as it is.
_METADATA = ("METADATA", "entry_points.txt")
_WHEEL = b"Wheel-Version: 1.0\nGenerator: guava_nb\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
#: The oldest time that a zip file can tell, for all files: the same files give the same wheel.
_TIME = (1980, 1, 1, 0, 0, 0)
_MODE = 0o644 << 16


@dataclass(frozen=True)
class Wheel:
    """A wheel in memory.

    Attributes:
        name: of the file, as pip wants it.
        version: of the package.
        content: its bytes.
    """

    name: str
    version: str
    content: bytes

    @property
    def sha256(self) -> str:
        """Of the content, in hexadecimal digits."""
        return hashlib.sha256(self.content).hexdigest()


def build_wheel() -> Wheel:
    """Make the wheel of what is imported here.

    Raises:
        ConfigError: the package was never installed, so its metadata are not known; or a file cannot be read.
    """
    try:
        found = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError as problem:
        raise ConfigError(
            "guava_nb runs from a folder and was never installed, so no wheel can be made of it: python -m pip install -e "
            "FOLDER here first"
        ) from problem
    folder = f"guava_nb-{found.version}.dist-info"
    files = {f"guava_nb/{path.relative_to(_PACKAGE).as_posix()}": path.read_bytes() for path in _sources()}
    files |= {f"{folder}/{name}": text.encode() for name in _METADATA if (text := found.read_text(name))}
    files |= {f"{folder}/licenses/{name}": content for name, content in _licences(found)}
    return pack("guava_nb", found.version, files)


def _sources() -> Iterator[Path]:
    for path in _PACKAGE.rglob("*"):
        inside = path.relative_to(_PACKAGE).parts
        if path.is_file() and not any(part == "__pycache__" or part.startswith(".") for part in inside):
            yield path


def _licences(found: metadata.Distribution) -> Iterator[tuple[str, bytes]]:
    for file in found.files or ():
        if "licenses" in file.parts and ".dist-info" in file.parts[0]:
            yield PurePosixPath(file).name, Path(str(file.locate())).read_bytes()


def pack(name: str, version: str, files: dict[str, bytes]) -> Wheel:
    """Put files into a pure wheel, with the WHEEL and RECORD that belong to them. The same files give the same bytes.

    Args:
        name: of the distribution, as it stands in file names.
        version: of it.
        files: by their path in the wheel; METADATA of the dist-info folder among them.
    """
    folder = f"{name}-{version}.dist-info"
    files = {**files, f"{folder}/WHEEL": _WHEEL}
    rows = [f"{path},sha256={_digest(files[path])},{len(files[path])}" for path in sorted(files)]
    files[f"{folder}/RECORD"] = "\n".join([*rows, f"{folder}/RECORD,,", ""]).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path in sorted(files):
            info = zipfile.ZipInfo(path, _TIME)
            info.compress_type, info.external_attr, info.create_system = zipfile.ZIP_DEFLATED, _MODE, 3
            archive.writestr(info, files[path])
    return Wheel(f"{name}-{version}-py3-none-any.whl", version, buffer.getvalue())


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
