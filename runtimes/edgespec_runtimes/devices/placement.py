"""On which device a bundle is to run: asked for and fitting, or chosen and explained. Never a silent one."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from edgespec_models.bundles.bundle import Bundle
from edgespec_models.bundles.static_graphs import ExportDevice, Form
from edgespec_models.errors import DeviceError
from edgespec_runtimes.devices.discovery import AUTO, Device, Runtime, devices, resolve
from edgespec_runtimes.session import Compiled, Session

__all__ = ["Placement", "export_for", "place", "run_at_once"]

_FORMS: Mapping[Form, str] = MappingProxyType(
    {
        "dynamic": "graphs of any shape",
        "dynamic-float16": "graphs of any shape in float16",
        "static-float": "static shapes in floating point",
        "static-quantized": "static shapes with quantized activations",
    }
)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model runs.

    Attributes:
        device: the device.
        reason: why this one.
    """

    device: Device
    reason: str

    def __str__(self) -> str:
        return f"{self.device.name} ({self.reason})"

    def opened(self, session: Session) -> "Placement":
        """With what opening the graphs found out: whether the bundle's context binaries are used."""
        found = session.compiled if isinstance(session, Compiled) else ""
        return replace(self, reason=f"{self.reason}; {found}") if found else self


def place(bundle: Bundle, wanted: str = AUTO, runtime: Runtime | None = None) -> Placement:
    """Decide where ``bundle`` runs, before anything of it is loaded.

    Args:
        bundle: the model.
        wanted: a device's name, ``npu``, or ``auto``: what the bundle was made for if this machine has it,
            else the CPU.
        runtime: None for this machine's.

    Raises:
        DeviceError: the device is not known, cannot be had, or cannot run this bundle; says which export can.
    """
    if wanted != AUTO:
        device = resolve(wanted, runtime)
        _check_fit(bundle, device)
        return Placement(device, "asked for")
    form = bundle.manifest.form
    if form == "dynamic":
        return Placement(resolve("cpu", runtime), "the bundle was made for the CPU")
    return _best(bundle, form, devices(runtime))


def export_for(wanted: str, runtime: Runtime | None = None) -> ExportDevice | None:
    """What a checkpoint is to be exported for, to run on ``wanted``; None is the CPU.

    Raises:
        DeviceError: the device is not known or cannot be had.
    """
    return None if wanted == AUTO else resolve(wanted, runtime).kind.export


def run_at_once(one: Placement, other: Placement) -> bool:
    """Whether two models there compute side by side: on hardware of two kinds, none of it emulated."""
    first, second = one.device, other.device
    return first.kind.hardware != second.kind.hardware and first.state == second.state == "ready"


def _best(bundle: Bundle, form: Form, found: Sequence[Device]) -> Placement:
    cpu, *others = found
    suited = [device for device in others if form in device.kind.runs]
    made_for = bundle.manifest.made_for
    suited.sort(key=lambda device: device.kind.export != made_for)
    ready = next((device for device in suited if device.state == "ready"), None)
    if ready is not None:
        return Placement(ready, f"the bundle has {_FORMS[form]}, and this machine has a device for it")
    missing = "; ".join(f"{d.name}: {d.problem or 'only emulated here'}" for d in suited)
    return Placement(cpu, f"the bundle has {_FORMS[form]}, but {missing}")


def _check_fit(bundle: Bundle, device: Device) -> None:
    form, kind = bundle.manifest.form, device.kind
    if form in kind.runs:
        return
    source = shlex.quote(str(bundle.manifest.provenance.get("source", "SOURCE")))
    option = "" if kind.export is None else f" --device {kind.export}"
    role = "" if bundle.manifest.role == "target" else f" --role {bundle.manifest.role}"
    runs = " or ".join(_FORMS[form] for form in sorted(kind.runs))
    raise DeviceError(
        f"{bundle.path} has {_FORMS[form]}; {device.name} runs {runs}. "
        f"Export it for this device: edgespec export {source} -o DIR{role}{option}"
    )
