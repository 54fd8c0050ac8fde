"""The engines together: who is there, polling them, their prompt assets, and the choice for a request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import aiohttp
import msgspec

from octavo_router.assets import AssetStore
from octavo_router.cost import Choice, Policy, Work, pick
from octavo_router.engine import Engine, Scheme, ServerInfo
from octavo_router.index import PrefixIndex
from octavo_router.membership import Endpoint
from octavo_router.metrics import Metrics
from octavo_router.prefix import Exact, Prefix, rendezvous_key

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
# An engine that works hard on few cores may be slow to answer. A silent one gets no new requests after the
# first miss, and is given up after MISSES_UNTIL_DEAD x (timeout + interval).
POLL_TIMEOUT_S = 2.0
# A timeout that fires this late says that this process gets no CPU, nothing about the engine.
OWN_LAG_S = 0.5


@dataclass(frozen=True)
class Selected:
    """An engine for a request, with what was expected of it."""

    engine: Engine
    choice: Choice


class Fleet:
    """All engines by endpoint name. Everything here runs on the event loop."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        metrics: Metrics,
        index: PrefixIndex,
        *,
        policy: Policy,
        private_key: str | None,
        poll_interval_s: float = POLL_INTERVAL_S,
        poll_timeout_s: float = POLL_TIMEOUT_S,
    ) -> None:
        self.engines: dict[str, Engine] = {}
        self.index = index
        self.policy = policy
        self._session = session
        self._metrics = metrics
        self._headers = {"Authorization": f"Bearer {private_key}"} if private_key else {}
        self._interval = poll_interval_s
        self._timeout = aiohttp.ClientTimeout(total=poll_timeout_s)
        self._pollers: dict[str, asyncio.Task[None]] = {}
        self.assets = AssetStore(session, self._headers, self._judge_all)
        self._exact: dict[str, Exact] = {}
        self._by_text: dict[str, str] = {}  # model -> why its engines are routed by text; "" = they are not
        self._turn = 0

    # --- membership -----------------------------------------------------------------------------------------

    def apply(self, endpoints: Iterable[Endpoint]) -> None:
        """Make the fleet equal to this list; an endpoint whose address changed is another engine."""
        wanted = {e.name: e for e in endpoints}
        for name, engine in list(self.engines.items()):
            new = wanted.get(name)
            if new is None or (new.url, new.private_url) != (
                engine.endpoint.url,
                engine.endpoint.private_url,
            ):
                self._remove(engine)
            elif new != engine.endpoint:
                engine.endpoint = new
                log.info("endpoint %s is %s", name, "terminating" if new.terminating else "back")
        for name, endpoint in wanted.items():
            if name not in self.engines:
                log.info("endpoint %s at %s joins", name, endpoint.url)
                engine = self.engines[name] = Engine(endpoint)
                self._metrics.watch_engine(engine)
                self._pollers[name] = asyncio.create_task(self._poll_forever(engine), name=f"poll {name}")

    def _remove(self, engine: Engine) -> None:
        log.info("endpoint %s at %s leaves", engine.name, engine.endpoint.url)
        del self.engines[engine.name]
        self._pollers.pop(engine.name).cancel()
        self.index.remove_endpoint(engine.name)
        self._metrics.forget_engine(engine.name)
        self._judge_all()

    async def close(self) -> None:
        """Stop polling."""
        pollers = list(self._pollers.values())
        for task in pollers:
            task.cancel()
        await asyncio.gather(*pollers, return_exceptions=True)
        await self.assets.close()

    # --- polling --------------------------------------------------------------------------------------------

    async def _poll_forever(self, engine: Engine) -> None:
        while True:
            engine.wake.clear()
            await self._poll(engine)
            try:
                await asyncio.wait_for(engine.wake.wait(), self._interval)
            except TimeoutError:
                continue

    async def _poll(self, engine: Engine) -> None:
        asked_at = time.monotonic()
        url = f"{engine.endpoint.private_url}/server_info"
        try:
            async with self._session.get(url, headers=self._headers, timeout=self._timeout) as response:
                data = await response.read()
                if response.status != 200:
                    hint = ": is OCTAVO_PRIVATE_KEY the engine's?" if response.status in (401, 403) else ""
                    raise ValueError(f"{url} answered {response.status}{hint}")
                info = msgspec.json.decode(data, type=ServerInfo)
        except (aiohttp.ClientConnectorError, ConnectionRefusedError) as error:
            self._missed(engine, f"{url} refused: {error}", refused=True)
        except TimeoutError:
            if time.monotonic() - asked_at > (self._timeout.total or 0.0) + OWN_LAG_S:
                log.warning("this router is short of CPU: a poll of %s ran late", engine.name)
                return
            self._missed(engine, f"{url} did not answer within {self._timeout.total} s", refused=False)
        except (aiohttp.ClientError, OSError, ValueError, msgspec.DecodeError) as error:
            self._missed(engine, f"{url}: {error}", refused=False)
        else:
            self._polled(engine, info, asked_at)

    def _missed(self, engine: Engine, error: str, *, refused: bool) -> None:
        first = engine.error != error
        if engine.missed(error, refused=refused):
            log.warning("endpoint %s is dead: %s", engine.name, error)
            self._judge_all()
        elif first:
            log.info("endpoint %s: %s", engine.name, error)

    def _polled(self, engine: Engine, info: ServerInfo, asked_at: float) -> None:
        before, state, alive, scheme = engine.info, engine.state, engine.alive, engine.scheme
        if engine.polled(info, asked_at):
            log.info("endpoint %s started anew (epoch %s)", engine.name, info.epoch)
            self.index.remove_endpoint(engine.name)
        if engine.state != state or engine.alive != alive:
            log.info("endpoint %s is %s", engine.name, engine.state)
        if engine.info is not before and info.kv is not None and info.kv.num_blocks:
            self.index.set_capacity(engine.name, info.kv.num_blocks)
        if engine.scheme is not None and self.policy == "prefix-affinity":
            self.assets.want(engine.scheme, engine.endpoint.private_url)
        if (engine.scheme, engine.state, engine.alive) != (scheme, state, alive):
            self._judge_all()

    def dead(self, engine: Engine, error: str) -> None:
        """A request found that nothing listens there: out at once, until a poll succeeds."""
        if engine.die(error):
            log.warning("endpoint %s is dead: %s", engine.name, error)
            self._judge_all()

    def refused(self, engine: Engine, error: str) -> None:
        """A request was answered 503: no more work there until a poll says ready."""
        engine.refused(error)
        self._judge_all()

    # --- do the engines of a model name prefixes alike? -----------------------------------------------------

    def models(self) -> dict[str, Engine]:
        """Model names served by an engine that is alive, each with one engine that serves it."""
        return {name: e for e in self.engines.values() if e.alive for name in e.names}

    def knows(self, model: str) -> bool:
        """Some engine, dead or alive, has said that it serves this model."""
        return any(model in e.names for e in self.engines.values())

    def longest(self, model: str) -> int | None:
        """The most tokens that an engine of this model has said to take; None while none has."""
        lengths = [e.info.model.max_model_len for e in self.engines.values() if e.info and model in e.names]
        return max((length for length in lengths if length is not None), default=None)

    def exact(self, model: str) -> Exact | None:
        """How to name prefixes as this model's engines do, or None: by text."""
        return self._exact.get(model)

    def _judge_all(self) -> None:
        """After any change of an engine or of assets. What changes is logged once and is a metric."""
        if self.policy != "prefix-affinity":
            return
        models = {name for e in self.engines.values() for name in e.names}
        for model in models:
            self._judge(model)
        for model in set(self._by_text) - models:
            del self._by_text[model]
            self._exact.pop(model, None)
            self._metrics.forget_model(model)

    def _judge(self, model: str) -> None:
        ready = [e for e in self.engines.values() if e.alive and e.state == "ready" and model in e.names]
        schemes = {e.name: e.scheme for e in ready}
        distinct = set(schemes.values())
        exact, loud = None, False
        if not ready:
            return
        if len(distinct) > 1:
            reason, loud = "engines differ: " + _differences(schemes), True
        elif (scheme := distinct.pop()) is None:
            reason = "engines publish no hash scheme or no prompt digests"
        else:
            exact, reason, loud = self.assets.exact(scheme)
        if exact is not None:
            self._exact[model] = exact
        else:
            self._exact.pop(model, None)
        if self._by_text.get(model) == reason:
            return
        self._by_text[model] = reason
        self._metrics.by_text(model, bool(reason), mismatch=loud)
        if reason:
            level = logging.ERROR if loud else logging.INFO
            log.log(level, "model %s is routed by hashes of its text, not of its tokens: %s", model, reason)
        else:
            log.info("model %s is routed by the engines' own block hashes", model)

    def not_ready(self) -> str:
        """Why this router should get no requests yet; empty when it should."""
        if not self.engines:
            return "there are no endpoints"
        ready = [e for e in self.engines.values() if e.takes_work]
        if not ready:
            states = "; ".join(
                f"{e.name} is {e.state}" + (f" ({e.error})" if e.error else "") for e in self.engines.values()
            )
            return f"no engine is ready: {states}"
        if self.policy == "prefix-affinity" and all(
            e.scheme is not None and self.assets.loading(e.scheme) for e in ready
        ):
            return "the tokenizer and chat template of the engines are being loaded"
        return ""

    def degraded(self) -> dict[str, str]:
        """Models routed by text, and why."""
        return {model: reason for model, reason in self._by_text.items() if reason}

    # --- the choice -----------------------------------------------------------------------------------------

    def holder(self, response_id: object) -> Engine | None:
        """The engine that made a response, whose epoch stands in the id; None when it is here no more."""
        epoch = response_id[5:37] if isinstance(response_id, str) else ""
        alive = (e for e in self.engines.values() if e.info is not None)
        return next((e for e in alive if e.info and e.info.epoch.replace("-", "") == epoch), None)

    def select(
        self, model: str | None, prefix: Prefix, raw: bytes, exclude: Collection[Engine] = ()
    ) -> Selected | None:
        """The engine for a request, or None when none can take it. ``model`` None: any engine."""
        able = [
            e
            for e in self.engines.values()
            if e.takes_work and e not in exclude and (model is None or model in e.names)
        ]
        able = [e for e in able if not e.suspect] or able
        if not able:
            return None
        matched: dict[str, int] = {}
        candidates = []
        for engine in able:
            counts = [self.index.match(h, engine.name) for h in prefix.hashes]
            matched[engine.name] = counts[0] if counts else 0
            # The engine always computes the last token of a prompt, so its last block never counts as a hit
            # when full.
            cached = sum(
                min(count * prefix.block_tokens, (length - 1) // prefix.block_tokens * prefix.block_tokens)
                for count, length in zip(counts, prefix.lengths, strict=True)
                if length
            )
            candidates.append(engine.candidate(cached))
        key = rendezvous_key(prefix, max(matched.values()), raw)
        self._turn += 1
        work = Work(prefix.tokens, key, prefix.blocks if prefix.exact else 0, self._turn)
        choice = pick(work, candidates, self.policy)
        return Selected(self.engines[choice.endpoint], choice)


def _differences(schemes: dict[str, Scheme | None]) -> str:
    """Which fields differ, and who says what."""
    parts = []
    for name in Scheme.__struct_fields__:
        values = {engine: getattr(scheme, name, None) for engine, scheme in sorted(schemes.items())}
        if len(set(values.values())) > 1:
            parts.append(f"{name}: " + ", ".join(f"{engine} has {value}" for engine, value in values.items()))
    return "; ".join(parts)
