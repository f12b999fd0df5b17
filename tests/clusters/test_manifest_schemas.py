"""Validates the manifests that `paceline launch-script` prints against the published schemas.

The package kubeflow-trainer-api contains the schemas of Kubernetes, JobSet and Kubeflow Trainer as pydantic classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, get_args, get_origin

import pytest

from paceline.operate.launch.launch_script import KINDS, LaunchScriptOptions

pytestmark = [pytest.mark.cluster, pytest.mark.soak]

CLASSES = {
    "Job": "IoK8sApiBatchV1JobSpec",
    "JobSet": "JobsetV1alpha2JobSetSpec",
    "TrainJob": "TrainerV1alpha1TrainJobSpec",
}


@pytest.fixture
def schema_of() -> Callable[[dict[str, Any]], Any]:
    """Returns the schema of a document's `spec`."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    return lambda document: getattr(models, CLASSES[document["kind"]])


def documents(text: str) -> list[dict[str, Any]]:
    """Yields the documents in a manifest for which the package has a schema."""
    yaml = pytest.importorskip("yaml")
    return [each for each in yaml.safe_load_all(text) if each["kind"] in CLASSES]


def unknown_fields(kind: Any, value: Any, place: str) -> Iterator[str]:
    """Yields the paths of the fields in `value` that the schema type `kind` does not have."""
    if get_origin(kind) is dict or value is None:
        return
    if isinstance(value, list):
        for each in value:
            yield from unknown_fields(_part(kind), each, place)
    elif hasattr(kind, "model_fields"):
        fields = {field.alias or name: field.annotation for name, field in kind.model_fields.items()}
        for name, each in value.items():
            if name not in fields:
                yield f"{place}/{name}"
            else:
                yield from unknown_fields(_part(fields[name], isinstance(each, list)), each, f"{place}/{name}")


def _part(kind: Any, is_list: bool = False) -> Any:
    """Returns the argument of Optional[...], or of List[...] if the Optional has already been removed."""
    while get_args(kind) and get_origin(kind) is not dict and not (is_list and get_origin(kind) is list):
        kind = next(each for each in get_args(kind) if each is not type(None))
    return kind


@pytest.mark.parametrize("kind", ["k8s", "jobset", "kubeflow"])
@pytest.mark.parametrize("gpus", [0, 8])
def test_the_manifests_fit_the_published_schemas(schema_of, kind, gpus):
    request = LaunchScriptOptions(("train.py", "--epochs", "3"), nodes=4, name="digits", gpus=gpus)
    (document,) = documents(KINDS[kind](request))
    schema = schema_of(document)
    assert schema.from_dict(document["spec"]) is not None
    assert list(unknown_fields(schema, document["spec"], document["kind"])) == []


@pytest.mark.parametrize("kind", ["k8s", "jobset", "kubeflow"])
def test_a_field_that_there_is_not_would_be_found(schema_of, kind):
    text = KINDS[kind](LaunchScriptOptions(("train.py",))).replace("command:", "comand:")
    (document,) = documents(text)
    assert any("comand" in each for each in unknown_fields(schema_of(document), document["spec"], ""))
