"""Maps the top-level folder ``patches/`` into the package (see docs/decisions/0001-house.md)."""

from setuptools import find_packages, setup

packages = find_packages(include=["mindspeed_autoparallel", "mindspeed_autoparallel.*"])
patches = ["mindspeed_autoparallel.patches"]
patches += [f"mindspeed_autoparallel.{name}" for name in find_packages() if name.startswith("patches.")]

setup(
    packages=sorted({*packages, *patches}),
    package_dir={"mindspeed_autoparallel.patches": "patches"},
    package_data={
        "mindspeed_autoparallel": [
            f"**/*.{ending}" for ending in ("json", "yaml", "sqlite", "html", "css", "js", "svg", "typed")
        ]
    },
)
