"""The parts of edgespec that a frozen app needs and PyInstaller does not find in its imports."""

from PyInstaller.utils.hooks import collect_data_files, collect_dynamic_libs, copy_metadata

import edgespec

PACKAGES = ("edgespec", "edgespec_models", "edgespec_runtimes", "edgespec_export")

hiddenimports = sorted(set(edgespec._HOMES.values()))  # its names are imported when they are first used
binaries = collect_dynamic_libs("edgespec_runtimes", search_patterns=["edgespec_kernels.*"])
datas = copy_metadata("edgespec") + [pair for package in PACKAGES for pair in collect_data_files(package)]
