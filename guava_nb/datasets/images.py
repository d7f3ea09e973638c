"""Folders of images, one folder per class, as uint8 tensors. Nothing is scaled, normalised or resized unless asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from guava_nb.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["ImageFolder"]

_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_MODES = {"RGB": 3, "L": 1, "RGBA": 4}
_ROTATED = (5, 6, 7, 8)  # EXIF orientations that exchange height and width
_ORIENTATION = 0x0112
_TIFF_BITS = 258
#: Pillow's modes with more than 8 bits: making them RGB would cut values off.
_DEEP_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")


class ImageFolder(Dataset[Any]):
    """Images below a folder: `root/cat/a.png` is of class "cat". A sample is `(image, class id)`.

    An image is a uint8 tensor [channels, height, width]. Rules, whatever the files hold: an EXIF orientation is applied;
    grey becomes RGB by three equal channels, a palette is looked up, transparency is dropped without blending; of a moving
    image the first frame counts; more than 8 bits per channel is refused. Files that are no images by their suffix, and
    hidden ones, are left out. Linked folders are
    followed, each once per class and none that holds the link. Order: classes by name, in each class files by path.

    Args:
        root: the folder.
        resize: (height, width), or one number for both: every image is resized with Pillow's bilinear filter. None: all must
            have one size.
        mode: "RGB", "L" (grey) or "RGBA".
        labelled: False takes all images below the folder, a sample is the image alone.
        check: look at every file's head now, so that a damaged file or another size is found before training.

    Attributes:
        classes: names by id.
        paths: of the samples, by index.

    Raises:
        ConfigError: there is nothing, a class is empty, a file is damaged, or sizes differ; the message names the file.
    """

    def __init__(
        self,
        root: str | Path,
        resize: int | tuple[int, int] | None = None,
        *,
        mode: str = "RGB",
        labelled: bool = True,
        check: bool = True,
    ) -> None:
        self._root = Path(root).expanduser()
        if mode not in _MODES:
            raise ConfigError(f"mode is {mode!r}; it is one of: {', '.join(_MODES)}")
        if not self._root.is_dir():
            what = "is a file, not a folder" if self._root.exists() else f"is no folder (looked from {Path.cwd()})"
            raise ConfigError(f"{self._root} {what}: give the folder that holds one folder of images per class")
        self._resize = _checked_resize(resize)
        self._mode, self._labelled = mode, labelled
        self.classes, found = _classes(self._root) if labelled else ((), [(path, -1) for path in _images(self._root)])
        if not found:
            raise ConfigError(f"{self._root} holds no images ({', '.join(_SUFFIXES)})")
        self.paths = tuple(path for path, _ in found)
        self._labels = tuple(label for _, label in found)
        self._size = _head_size(self.paths[0])
        if check:
            for path in self.paths:
                self._same_size(path, _head_size(path))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        """Return sample `index`; negative ones count from the end.

        Raises:
            IndexError: there is no such image.
            ConfigError: the file is damaged, or its size is another.
        """
        image = torch.from_numpy(self._pixels(self.paths[index])).permute(2, 0, 1).contiguous()
        return (image, self._labels[index]) if self._labelled else image

    def __repr__(self) -> str:
        height, width = self._resize or self._size
        text = f"ImageFolder({len(self)} images [{_MODES[self._mode]}, {height}, {width}] uint8"
        named = ", ".join(f"{name!r}={number}" for number, name in enumerate(self.classes[:10]))
        return text + (
            f", {len(self.classes)} classes: {named}{', ...' if len(self.classes) > 10 else ''})" if named else ")"
        )

    def _pixels(self, path: Path) -> np.ndarray[Any, Any]:
        from PIL import Image, ImageOps

        with _opened(path) as image:
            try:
                _refuse_deep(path, image)
                image.load()
                turned = ImageOps.exif_transpose(image) or image
                ready = turned if turned.mode == self._mode else turned.convert(self._mode)
            except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
                if isinstance(error, ConfigError):
                    raise
                raise ConfigError(f"{path} is damaged: {error}") from error
        if self._resize is None:
            self._same_size(path, (ready.height, ready.width))
        else:
            ready = ready.resize((self._resize[1], self._resize[0]), Image.Resampling.BILINEAR)
        pixels = np.array(ready)
        return pixels[:, :, None] if pixels.ndim == 2 else pixels

    def _same_size(self, path: Path, size: tuple[int, int]) -> None:
        if self._resize is None and size != self._size:
            raise ConfigError(
                f"{path} is {size[0]} x {size[1]} pixels (height x width), and {self.paths[0]} is {self._size[0]} x "
                f"{self._size[1]}: images of one batch need one size; give resize=(height, width)"
            )


def _checked_resize(resize: Any) -> tuple[int, int] | None:
    if resize is None:
        return None
    sizes = tuple(resize) if isinstance(resize, tuple | list) else (resize, resize)
    whole = all(isinstance(size, int | np.integer) and not isinstance(size, bool) and size > 0 for size in sizes)
    if len(sizes) != 2 or not whole:
        raise ConfigError(f"resize is {resize!r}; give (height, width) in whole pixels, or one number for both")
    return int(sizes[0]), int(sizes[1])


def _classes(root: Path) -> tuple[tuple[str, ...], list[tuple[Path, int]]]:
    folders = sorted(entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not folders:
        loose = next(_images(root), None)
        raise ConfigError(
            f"{root} has no folders: put the images of each class into a folder named after it"
            + ("" if loose is None else f" ({loose.name} lies beside none), or take all without labels: labelled=False")
        )
    found: list[tuple[Path, int]] = []
    for label, folder in enumerate(folders):
        images = [(path, label) for path in _images(folder)]
        if not images:
            raise ConfigError(f"class {folder.name!r}: {folder} holds no images ({', '.join(_SUFFIXES)})")
        found += images
    return tuple(folder.name for folder in folders), found


def _images(folder: Path) -> Iterator[Path]:
    """Yield the images below a folder in order of their paths; the same on every system."""
    seen = {folder.resolve()}
    for place, folders, files in os.walk(folder, followlinks=True):
        above = Path(place).resolve().parents
        names, folders[:] = sorted(name for name in folders if not name.startswith(".")), []
        for name in names:
            real = Path(place, name).resolve()
            if real not in seen and real not in above:  # a link may lead in a circle
                seen.add(real)
                folders.append(name)
        for name in sorted(files):
            if not name.startswith(".") and name.lower().endswith(_SUFFIXES):
                yield Path(place, name)


def _opened(path: Path) -> Image:
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(path)
    except UnidentifiedImageError as error:
        raise ConfigError(f"{path} is damaged or no image: Pillow does not know its format") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _refuse_deep(path: Path, image: Image) -> None:
    """Refuse an image whose values Pillow would cut to 8 bits, of which its mode says nothing once it is RGB."""
    bits = 16 if image.mode in _DEEP_MODES else 8
    if image.format == "PNG":
        with path.open("rb") as file:
            bits = file.read(25)[24]  # in the head, after signature, length, name, width and height
    elif image.format == "TIFF":
        bits = max(bits, *image.tag_v2.get(_TIFF_BITS, (1,)))  # type: ignore[attr-defined]
    if bits > 8:
        raise ConfigError(
            f"{path} has more than 8 bits per channel ({bits}, mode {image.mode}), which would be cut off; make it 8 bits as "
            "you see fit, or read it with a data set of your own"
        )


def _head_size(path: Path) -> tuple[int, int]:
    """Height and width as they will be after the EXIF orientation; reads the head of the file only."""
    with _opened(path) as image:
        _refuse_deep(path, image)
        size = image.height, image.width
        if image.format == "PNG" and "exif" not in image.info:
            return size  # Pillow would decode the whole image to look behind it
        try:
            turned = image.getexif().get(_ORIENTATION) in _ROTATED
        except (OSError, SyntaxError, ValueError) as error:
            raise ConfigError(f"{path} is damaged: {error}") from error
        return size[::-1] if turned else size
