"""A worker of vLLM that forgets a tensor when it is told to, as a loader might that does not know its name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from unittest import mock

from torch import Tensor

from strop.publishing import into_vllm
from strop.publishing.into_vllm import IntoWorkers, WorkerExtension
from strop.publishing.transports.protocol import Offer
from strop.rollout.engines.vllm_weights import Sent


class ForgetfulWorker(WorkerExtension):
    def forget(self, rank: int, name: str) -> None:
        """At the next publication, once."""
        if self.rank == rank:
            self.__dict__["forgotten"] = name

    def strop_take(self, offer: Offer, sent: Sent) -> list[str]:
        forgotten = self.__dict__.pop("forgotten", None)
        load = into_vllm.load

        def without(worker: Any, weights: Iterable[tuple[str, Tensor]], *others: Any, **settings: Any) -> None:
            load(worker, ((name, tensor) for name, tensor in weights if name != forgotten), *others, **settings)

        with mock.patch.object(into_vllm, "load", without):
            return super().strop_take(offer, sent)


class IntoForgetful(IntoWorkers):
    extension = f"{ForgetfulWorker.__module__}.{ForgetfulWorker.__qualname__}"
