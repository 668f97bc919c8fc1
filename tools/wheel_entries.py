"""A wheel's archive against its own lists: every file whole and in RECORD, name and tag those of the file."""

import base64
import csv
import hashlib
from email import message_from_bytes
from pathlib import Path, PurePosixPath, PureWindowsPath
from zipfile import BadZipFile, ZipFile


class EntriesError(Exception):
    """What is wrong with a wheel."""


def check_entries(wheel: Path) -> int:
    """The number of files in ``wheel``, which all have to be as its lists say."""
    name, version, *tag = wheel.stem.split("-")
    info = f"{name}-{version}.dist-info"
    try:
        with ZipFile(wheel) as archive:
            entries = [entry for entry in archive.namelist() if not entry.endswith("/")]
            files = {entry: archive.read(entry) for entry in entries}
            about = message_from_bytes(files[f"{info}/WHEEL"])
            metadata = message_from_bytes(files[f"{info}/METADATA"])
            rows = list(csv.reader(files[f"{info}/RECORD"].decode("utf-8").splitlines()))
    except (BadZipFile, KeyError, UnicodeDecodeError) as error:
        raise EntriesError(f"{wheel.name} cannot be read: {error}") from error
    if about["Tag"] != "-".join(tag):
        raise EntriesError(f"{wheel.name} says that its tag is {about['Tag']}")
    if (metadata["Name"], metadata["Version"]) != (name, version):
        raise EntriesError(f"{wheel.name} says that it is {metadata['Name']} {metadata['Version']}")
    outside = [file for file in files if leads_out(file)]
    if outside or len(entries) != len({entry.lower() for entry in entries}):
        raise EntriesError(
            f"{wheel.name} has names that lead out of it or meet where case is nothing: {outside}"
        )
    listed = {row[0]: row[1] for row in rows}
    wanted = {file: digest(data) for file, data in files.items()} | {f"{info}/RECORD": ""}
    wrong = sorted(file for file in listed | wanted if listed.get(file) != wanted.get(file))
    if wrong:
        raise EntriesError(f"{wheel.name} has other files than its RECORD: {', '.join(wrong)}")
    return len(files)


def leads_out(name: str) -> bool:
    """Whether an entry would be written elsewhere, on any system."""
    return (
        ".." in PurePosixPath(name).parts
        or name.startswith("/")
        or bool("\\" in name or PureWindowsPath(name).drive)
    )


def digest(data: bytes) -> str:
    """As RECORD has it."""
    encoded = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode("ascii")
    return f"sha256={encoded.rstrip('=')}"
