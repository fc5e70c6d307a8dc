from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "minimal_plugin"


@pytest.mark.slow
def test_third_party_plugin_passes_the_conformance_kit_from_its_wheel(build_wheel, environment_of):
    names = ("booster-core", "booster-checkpoint", "booster-runtime", "booster-testing")
    environment = environment_of(*(build_wheel(ROOT / "packages" / name) for name in names), build_wheel(EXAMPLE))
    assert "LocalSGDPlugin" in environment.booster("plugins", "--load").stdout
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLE / "tests"))
    done = environment.run(*command, cwd=ROOT, timeout=600)  # a busy machine takes several minutes
    assert " passed" in done.stdout
    assert "failed" not in done.stdout
