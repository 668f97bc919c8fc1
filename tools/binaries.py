"""What a shared library or object file says of itself (ELF, PE, Mach-O; 64 bits), for other tools."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Binary", "read_binary"]

ELF_MACHINES = {62: "x86-64", 183: "ARM64"}
PE_MACHINES = {0x8664: "x86-64", 0xAA64: "ARM64"}
MACHO_MACHINES = {0x1000007: "x86-64", 0x100000C: "ARM64"}


@dataclass(frozen=True)
class Binary:
    """Kind of file and processor, the libraries it needs, the names that others may use."""

    kind: str
    needed: tuple[str, ...]
    exported: frozenset[str]


def read_binary(data: bytes) -> Binary:
    """Read a file of any of the three kinds."""
    if data[:4] == b"\x7fELF":
        return read_elf(data)
    if data[:2] == b"MZ":
        return read_pe(data)
    if data[:4] == b"\xcf\xfa\xed\xfe":
        return read_macho(data)
    raise ValueError(f"neither ELF nor PE nor Mach-O of 64 bits: begins with {data[:4].hex()}")


def text_at(data: bytes, at: int) -> str:
    """The text that begins at ``at`` and ends at a zero byte."""
    return data[at : data.index(b"\0", at)].decode()


def read_elf(data: bytes) -> Binary:
    """Linux: the dynamic symbols of a library, the global ones of an object file."""
    kind, machine = struct.unpack_from("<2H", data, 16)
    sections_at, size, count = *struct.unpack_from("<Q", data, 40), *struct.unpack_from("<2H", data, 58)
    sections = [struct.unpack_from("<2I4Q2I2Q", data, sections_at + i * size) for i in range(count)]
    symbols, dynamic = 2 if kind == 1 else 11, 6  # section types
    exported, needed = set[str](), list[str]()
    for _, section, _, _, start, length, link, _, _, _ in sections:
        if section not in {symbols, dynamic}:
            continue
        names = sections[link][4]
        if section == dynamic:
            entries = (struct.unpack_from("<2Q", data, at) for at in range(start, start + length, 16))
            needed += [text_at(data, names + value) for tag, value in entries if tag == 1]
        else:
            entries = (struct.unpack_from("<I2BH", data, at) for at in range(start, start + length, 24))
            exported |= {
                text_at(data, names + name)
                for name, info, other, place in entries
                if info >> 4 in {1, 2} and place and (kind == 1 or not other & 3)
            }
    return Binary(f"ELF {ELF_MACHINES.get(machine, machine)}", tuple(needed), frozenset(exported))


def read_pe(data: bytes) -> Binary:
    """Windows: the tables of exported names and of imported libraries."""
    (header,) = struct.unpack_from("<I", data, 0x3C)
    machine, section_count, optional_size = (
        *struct.unpack_from("<2H", data, header + 4),
        *struct.unpack_from("<H", data, header + 20),
    )
    tables = header + 24 + 112
    first_section = header + 24 + optional_size
    sections = [struct.unpack_from("<4I", data, first_section + 40 * i + 8) for i in range(section_count)]

    def place(address: int) -> int:
        """Where in the file lies what is loaded at ``address``."""
        for size, start, _, at in sections:
            if start <= address < start + size:
                return int(at + address - start)
        raise ValueError(f"no section of the file is loaded at {address:#x}")

    exports, _, imports, _ = struct.unpack_from("<4I", data, tables)
    exported, needed = set[str](), list[str]()
    if exports:
        (count,) = struct.unpack_from("<I", data, place(exports) + 24)
        (names,) = struct.unpack_from("<I", data, place(exports) + 32)
        addresses = struct.unpack_from(f"<{count}I", data, place(names))
        exported = {text_at(data, place(address)) for address in addresses}
    at = place(imports) if imports else len(data)
    while at < len(data) and (name := struct.unpack_from("<I", data, at + 12)[0]):
        needed.append(text_at(data, place(name)))
        at += 20
    return Binary(f"PE {PE_MACHINES.get(machine, machine)}", tuple(needed), frozenset(exported))


def read_macho(data: bytes) -> Binary:
    """MacOS: the load commands for libraries, and the global symbols."""
    _, machine, _, _, count = struct.unpack_from("<5I", data)
    exported, needed = set[str](), list[str]()
    at = 32
    for _ in range(count):
        command, size = struct.unpack_from("<2I", data, at)
        if command & 0x7FFFFFFF in {0xC, 0x18, 0x1F, 0x23}:  # libraries: plain, weak, exported again, upward
            needed.append(text_at(data, at + struct.unpack_from("<I", data, at + 8)[0]))
        elif command == 2:
            exported |= set(macho_symbols(data, *struct.unpack_from("<3I", data, at + 8)))
        at += size
    return Binary(f"Mach-O {MACHO_MACHINES.get(machine, machine)}", tuple(needed), frozenset(exported))


def macho_symbols(data: bytes, table: int, count: int, names: int) -> Iterator[str]:
    """The defined global symbols, without the underscore that C puts before names."""
    for i in range(count):
        name, kind, section = struct.unpack_from("<I2B", data, table + 16 * i)
        if kind & 1 and section and not kind & 0xF0:
            yield text_at(data, names + name).removeprefix("_")
