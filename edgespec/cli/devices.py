"""``edgespec devices``: the devices that models can run on here, and what others lack."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgespec.cli.console import print_json, say
from edgespec.cli.options import JsonFlag

if TYPE_CHECKING:
    from edgespec_runtimes.devices import Device


def devices(as_json: JsonFlag = False) -> None:
    """List the devices that models can run on here, and what to install for others.

    Asks ONNX Runtime and its installed plugins. A model runs on the CPU unless its bundle was made for
    another device; --device of the commands that load models asks for one.

    Examples:

        edgespec devices

        edgespec devices --json
    """
    import edgespec

    found_devices = edgespec.devices()
    if as_json:
        print_json([device.to_json() for device in found_devices])
        return
    show_devices(found_devices)


def show_devices(devices: "Sequence[Device]") -> None:
    """Print a paragraph for each device."""
    for device in devices:
        kind = device.kind
        vendor = f", {device.vendor}" if device.vendor else ""
        version = f", {kind.provider} {device.version}" if device.version else ""
        say(f"{device.name}: {device.state} ({kind.title}{vendor}{version})")
        made = f"edgespec export SOURCE -o DIR --device {kind.export}" if kind.export else "any bundle"
        say(f"  runs: {made}")
        if device.problem is not None:
            say(f"  missing: {device.problem}")
        if device.remedy is not None:
            say(f"  {device.remedy}".replace("\n", "\n    "))
        for limit in kind.limits:
            say(f"  - {limit}")
    first = next((d for d in devices[1:] if d.state == "ready"), None)
    if first is None:
        say("\nauto takes: cpu, since nothing else is ready here")
    else:
        say(f"\nauto takes: {first.name} for bundles made for it, cpu for all others")
