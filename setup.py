"""Maps the top-level folder ``patches/`` into the package (see docs/decisions/0001-house.md), and makes archives whose
bytes depend on their content only (``SOURCE_DATE_EPOCH``)."""

import gzip
import os
import tarfile
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.sdist import sdist

packages = find_packages(include=["mindspeed_autoparallel", "mindspeed_autoparallel.*"])
patches = ["mindspeed_autoparallel.patches"]
patches += [f"mindspeed_autoparallel.{name}" for name in find_packages() if name.startswith("patches.")]


class ReproducibleArchive(sdist):
    """A source archive without the times and owners of the machine that made it."""

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, owner=None, group=None):
        """Write ``base_name``.tar.gz of ``base_dir``, its files in the order of their names."""
        moment = int(os.environ.get("SOURCE_DATE_EPOCH", "0"))

        def plain(member):
            member.mtime, member.uid, member.gid, member.uname, member.gname = moment, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            return member

        archive = Path(f"{base_name}.tar.gz")
        with (
            archive.open("wb") as raw,
            gzip.GzipFile("", "wb", fileobj=raw, mtime=moment) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as content,
        ):
            for path in sorted(Path(root_dir or ".", base_dir or ".").rglob("*")):
                content.add(path, arcname=path.relative_to(root_dir or "."), recursive=False, filter=plain)
        return str(archive)


setup(
    packages=sorted({*packages, *patches}),
    package_dir={"mindspeed_autoparallel.patches": "patches"},
    package_data={
        "mindspeed_autoparallel": [
            f"**/*.{ending}" for ending in ("json", "table", "yaml", "sqlite", "html", "css", "js", "svg", "typed")
        ]
    },
    cmdclass={"sdist": ReproducibleArchive},
)
