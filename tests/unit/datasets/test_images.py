"""Folders of images: uint8, one documented rule for every kind of file, and the file's name in every complaint."""

from __future__ import annotations

import pickle
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from guava_nb.datasets.open_dataset import ImageFolder, open_dataset
from guava_nb.errors import ConfigError


def save(path: Path, pixels: np.ndarray, **arguments) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **arguments)
    return path


@pytest.fixture()
def pixels() -> np.ndarray:
    return np.random.RandomState(3).randint(0, 256, (6, 4, 3), np.uint8)


@pytest.fixture()
def root(tmp_path: Path, pixels: np.ndarray) -> Path:
    save(tmp_path / "dog" / "b.png", pixels)
    save(tmp_path / "dog" / "a.png", pixels[::-1].copy())
    save(tmp_path / "cat" / "deep" / "z.PNG", pixels)
    save(tmp_path / "cat" / ".hidden.png", pixels)
    save(tmp_path / ".thumbs" / "t.png", pixels)
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    return tmp_path


def test_pixels_arrive_as_they_are_in_a_fixed_order(root: Path, pixels: np.ndarray) -> None:
    dataset = open_dataset(root)
    assert dataset.classes == ("cat", "dog") and [p.name for p in dataset.paths] == ["z.PNG", "a.png", "b.png"]
    image, label = dataset[2]
    assert (image.dtype, tuple(image.shape), label) == (torch.uint8, (3, 6, 4), 1)
    assert np.array_equal(image.permute(1, 2, 0).numpy(), pixels)
    assert "3 images [3, 6, 4] uint8, 2 classes: 'cat'=0, 'dog'=1" in repr(dataset)
    assert torch.equal(pickle.loads(pickle.dumps(dataset))[2][0], image)
    alone = ImageFolder(root, labelled=False)
    assert isinstance(alone[0], torch.Tensor) and len(alone) == 3


def test_grey_palette_alpha_and_orientation_follow_the_rule(tmp_path: Path, pixels: np.ndarray) -> None:
    grey = save(tmp_path / "x" / "grey.png", pixels[:, :, 0].copy())
    alpha = np.dstack([pixels, np.full((6, 4), 9, np.uint8)])
    save(tmp_path / "x" / "alpha.png", alpha)
    Image.fromarray(pixels).quantize(256).save(tmp_path / "x" / "palette.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by a quarter to see it upright
    save(tmp_path / "x" / "turned.png", np.rot90(pixels).copy(), exif=exif)
    dataset = ImageFolder(tmp_path)
    found = {path.name: dataset[k][0] for k, path in enumerate(dataset.paths)}
    assert all(tuple(image.shape) == (3, 6, 4) for image in found.values())
    assert all(torch.equal(found["grey.png"][c], torch.from_numpy(pixels[:, :, 0].copy())) for c in range(3))
    assert np.array_equal(found["alpha.png"].permute(1, 2, 0).numpy(), pixels)
    assert np.array_equal(found["palette.png"].permute(1, 2, 0).numpy(), pixels)
    assert np.array_equal(found["turned.png"].permute(1, 2, 0).numpy(), pixels)
    assert tuple(ImageFolder(tmp_path, mode="L")[0][0].shape) == (1, 6, 4)
    assert torch.equal(ImageFolder(tmp_path, mode="RGBA")[0][0][3], torch.full((6, 4), 9, dtype=torch.uint8))
    save(grey, pixels.astype(np.uint16)[:, :, 0] * 256)
    with pytest.raises(ConfigError, match=r"grey\.png has more than 8 bits"):
        _ = ImageFolder(tmp_path)[1]


def test_different_sizes_are_named_unless_resize_is_given(root: Path, pixels: np.ndarray) -> None:
    odd = save(root / "dog" / "odd.png", pixels[:5])
    for check in (True, False):
        with pytest.raises(
            ConfigError, match=r"odd\.png is 5 x 4 pixels .*z\.PNG is 6 x 4: .*resize=\(height, width\)"
        ):
            _ = ImageFolder(root, check=check)[3]
    assert tuple(ImageFolder(root, resize=(8, 5))[3][0].shape) == (3, 8, 5)
    odd.unlink()
    assert tuple(ImageFolder(root, resize=7)[0][0].shape) == (3, 7, 7)


def test_damaged_files_are_named(root: Path) -> None:
    whole = (root / "dog" / "b.png").read_bytes()
    (root / "dog" / "b.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"b\.png is damaged"):
        _ = ImageFolder(root)[2]
    (root / "dog" / "b.png").write_bytes(b"hello")
    with pytest.raises(ConfigError, match=r"b\.png is damaged or no image"):
        ImageFolder(root)


def test_folders_without_images_are_told(tmp_path: Path, pixels: np.ndarray) -> None:
    with pytest.raises(ConfigError, match="has no folders"):
        open_dataset(tmp_path)
    save(tmp_path / "loose.png", pixels)
    with pytest.raises(ConfigError, match=r"loose\.png lies beside none.*labelled=False"):
        open_dataset(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="class 'empty'"):
        open_dataset(tmp_path)
    with pytest.raises(ConfigError, match="holds no images"):
        ImageFolder(tmp_path / "empty", labelled=False)
    with pytest.raises(ConfigError, match="mode is 'HSV'"):
        ImageFolder(tmp_path, mode="HSV")
    with pytest.raises(ConfigError, match=r"resize is \(0, 3\)"):
        ImageFolder(tmp_path, resize=(0, 3))


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


@pytest.mark.parametrize(("color", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)])
@pytest.mark.parametrize("check", [True, False])
def test_a_png_of_16_bits_is_refused_in_every_colour(tmp_path: Path, color, channels, check) -> None:
    (tmp_path / "c").mkdir()
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 16, color, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(b"\0" + bytes([0x12, 0xFF] * channels)))
    (tmp_path / "c" / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + head + data + chunk(b"IEND", b""))
    with pytest.raises(ConfigError, match=r"a\.png has more than 8 bits per channel \(16, .*make it 8 bits"):
        _ = ImageFolder(tmp_path, check=check)[0]


def test_a_tiff_of_16_bits_is_refused_and_one_of_8_is_read(tmp_path: Path, pixels: np.ndarray) -> None:
    save(tmp_path / "c" / "a.tif", pixels)
    assert np.array_equal(ImageFolder(tmp_path)[0][0].permute(1, 2, 0).numpy(), pixels)
    entries = [(256, 3, 1, 1), (257, 3, 1, 1), (258, 3, 3, 122), (259, 3, 1, 1), (262, 3, 1, 2)]
    entries += [(273, 4, 1, 128), (277, 3, 1, 3), (278, 3, 1, 1), (279, 4, 1, 6)]
    table = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    text = b"II*\0" + struct.pack("<IH", 8, len(entries)) + table + struct.pack("<I", 0)
    assert len(text) == 122
    (tmp_path / "c" / "a.tif").write_bytes(text + struct.pack("<HHH", 16, 16, 16) + b"\x12\xff" * 3)
    with pytest.raises(ConfigError, match=r"a\.tif has more than 8 bits per channel \(16, mode RGB"):
        ImageFolder(tmp_path)


def test_linked_folders_are_followed_and_circles_are_not(root: Path, pixels: np.ndarray, tmp_path_factory) -> None:
    far = tmp_path_factory.mktemp("far")
    save(far / "x.png", pixels)
    for link, target in (("more", far), ("again", far), ("self", root / "cat"), ("up", root)):
        (root / "cat" / link).symlink_to(target)
    (far / "back").symlink_to(root / "cat")
    dataset = ImageFolder(root)
    assert [path.relative_to(root).as_posix() for path in dataset.paths] == [
        "cat/again/x.png",
        "cat/deep/z.PNG",
        "dog/a.png",
        "dog/b.png",
    ]


@pytest.mark.parametrize("resize", [(2.5, 2), "22", (2,), (2, 2, 2), True, 0, [0, 3], 2.0])
def test_a_resize_that_is_no_size_is_told(root: Path, resize) -> None:
    with pytest.raises(ConfigError, match=r"resize is .*; give \(height, width\) in whole pixels"):
        ImageFolder(root, resize=resize)


@pytest.mark.parametrize("labelled", [True, False])
def test_a_folder_that_is_not_there_is_told(root: Path, labelled) -> None:
    with pytest.raises(ConfigError, match=r"nope is no folder \(looked from "):
        ImageFolder(root / "nope", labelled=labelled)
    with pytest.raises(ConfigError, match=r"b\.png is a file, not a folder"):
        ImageFolder(root / "dog" / "b.png", labelled=labelled)
