"""Scrape: the samples of GET /metrics, less those of an earlier one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from tests.server.conftest import RunningServer


class Scrape:
    """The samples of one scrape, less an earlier one's; `model_name` is checked and left out."""

    def __init__(self, server: RunningServer, since: Scrape | None = None) -> None:
        answer = server.get("/metrics")
        assert answer.status == 200
        self.text = answer.text
        self._values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                labels = dict(sample.labels)
                assert labels.pop("model_name", "toy") == "toy"
                key = (sample.name, frozenset(labels.items()))
                assert key not in self._values
                before = since._values.get(key, 0) if since else 0
                self._values[key] = sample.value - before

    def value(self, name: str, **labels: str) -> float:
        return self._values[name, frozenset(labels.items())]

    def by(self, label: str, name: str) -> dict[str, float]:
        """The samples of a name that have one label, by its value, without those at zero."""
        found = {
            dict(labels)[label]: value
            for (sample, labels), value in self._values.items()
            if sample == name and {key for key, _ in labels} == {label} and value
        }
        return dict(sorted(found.items()))
