"""The offline API: ``LLM(model=...).generate(prompts, params)``, the engine in this very process."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import tqdm

from octavo.config import engine_config
from octavo.core.generation_config import not_applied, sampling_defaults
from octavo.core.outputs import EngineOutput, EngineRequest, EngineStats, FinishReason
from octavo.core.plan import TokenLogprobs
from octavo.core.sampling_params import SamplingParams
from octavo.engine.core import EngineCore
from octavo.errors import InvalidRequest
from octavo.fetch import fetch, with_draft_here
from octavo.prompt.assets import load_assets
from octavo.prompt.engine_params import engine_params
from octavo.prompt.renderer import PromptRenderer
from octavo.prompt.text_stream import TextStream
from octavo.sampling.grammar_compiler import GrammarCompiler

Prompt: TypeAlias = str | Mapping[str, Any] | list[int]  # a text, {"prompt_token_ids": ids}, or ids
Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None

_CHAT_FIELDS = {
    "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools", "documents",
    "reasoning_effort",
}  # fmt: skip
_log = logging.getLogger("octavo.llm")


class CompletionOutput(msgspec.Struct):
    """One sample of a prompt. ``logprobs`` has one entry a token when they were asked for;
    ``cumulative_logprob`` is a beam's, whose results come best first.

    ``finish_reason`` "error" with ``error`` says that this sample alone failed.
    """

    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None


class RequestOutput(msgspec.Struct):
    """A prompt and its samples. ``prompt`` is None where token ids were given; ``prompt_logprobs`` has an
    entry for each prompt token but the first, when they were asked for.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None


class LLM:
    """A model loaded for batch use. ``settings`` are those of ``octavo serve`` (``max_model_len=2048``).

    Raises ``ConfigError`` and ``ModelLoadError``, as ``octavo serve`` does.
    """

    def __init__(self, model: str | os.PathLike[str], **settings: Any) -> None:
        from octavo.worker.executor import build_executor  # torch: only who makes an LLM needs it

        self.config = engine_config(os.fspath(model), settings)
        path = fetch(self.config.model, None, _log.info)
        assets = load_assets(path, self.config)
        if missing := not_applied(assets.generation_config):
            _log.warning("the model's generation_config.json asks for %s: not applied", ", ".join(missing))
        self.renderer = PromptRenderer(assets)
        self.config = with_draft_here(self.config, _log.info)
        executor = build_executor(self.config, path, lambda stage, detail: _log.info("%s %s", stage, detail))
        self.engine = EngineCore(self.config, executor)
        self._calls = itertools.count()
        self._grammars = GrammarCompiler()
        weakref.finalize(self, self._grammars.close)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None, *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Complete each prompt; answers come in the order of the prompts.

        ``params`` is one for all or one for each; without, the model's own defaults. Raises
        ``InvalidRequest`` before anything runs.
        """
        if not isinstance(prompts, (Sequence, Mapping)):
            raise InvalidRequest(
                f"prompts is {prompts!r:.100}: give a text, token ids, a dict, or a list of those",
                param="prompt",
            )
        alone = isinstance(prompts, (str, Mapping)) or (bool(prompts) and isinstance(prompts[0], int))
        each: Sequence[Any] = [prompts] if alone else list(prompts)
        texts = [self._prompt(prompt, index) for index, prompt in enumerate(each)]
        return self._run(texts, params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        params: Params = None,
        *,
        use_tqdm: bool = True,
        **fields: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several (a list of those).

        ``fields`` are those of a chat request: ``tools`` (calls come as the model writes them, within the
        text), ``chat_template_kwargs``, ``add_generation_prompt``, ``continue_final_message``, ``documents``,
        ``reasoning_effort``.
        """
        if unknown := set(fields) - _CHAT_FIELDS:
            raise InvalidRequest(f"chat does not know {min(unknown)!r}", param=min(unknown))
        each = [messages] if messages and isinstance(messages[0], Mapping) else messages
        rendered = [self.renderer.render({**fields, "messages": list(one)}) for one in each]
        texts = [(text, self.renderer.encode(text, add_special_tokens=False)) for text in rendered]
        return self._run(texts, params, use_tqdm)

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests without ``params`` get: the model's ``generation_config.json``, else our own."""
        return sampling_defaults(self.renderer.assets.generation_config)

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self.engine.admin("reset_prefix_cache")

    def sleep(self, level: int = 1) -> None:
        """Give back the memory of the KV cache, at level 2 of the weights too, until ``wake_up``."""
        if level not in (1, 2):
            raise InvalidRequest(f"level is {level!r:.100}: it must be 1 or 2", param="level")
        self.engine.admin("sleep", level=level)

    def wake_up(self, tags: Sequence[str] = ()) -> None:
        """Bring all back; with ``tags`` these parts ("weights", "kv_cache"). Raises ``ModelLoadError``."""
        self.engine.admin("wake_up", tags=tags)

    def _prompt(self, prompt: Any, index: int) -> tuple[str | None, list[int]]:
        try:
            if isinstance(prompt, Mapping):
                known = [name for name in ("prompt_token_ids", "prompt") if name in prompt]
                if not known:
                    raise InvalidRequest("a prompt is a text, or a dict with prompt_token_ids or prompt")
                text, prompt = prompt.get("prompt"), prompt[known[0]]
            else:
                text = prompt if isinstance(prompt, str) else None
            each = self.renderer.completion(prompt)
            if len(each) != 1:
                raise InvalidRequest(f"{len(each)} prompts in the place of one: give them side by side")
            return text, each[0]
        except InvalidRequest as error:
            raise InvalidRequest(f"prompts[{index}]: {error.message}", param="prompt") from error

    def _run(
        self, prompts: Sequence[tuple[str | None, list[int]]], params: Params, use_tqdm: bool
    ) -> list[RequestOutput]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        if isinstance(params, str) or not all(isinstance(one, SamplingParams) for one in params):
            raise InvalidRequest(f"params is {params!r:.100}: give SamplingParams, one for all or one each")
        if len(params) != len(prompts):
            raise InvalidRequest(
                f"{len(params)} sampling params for {len(prompts)} prompts: give 1 or one each"
            )
        params = self._with_grammars(params)
        call = next(self._calls)
        jobs = [
            _Job(self.renderer, index, text, ids, sampling, self.engine, call)
            for index, ((text, ids), sampling) in enumerate(zip(prompts, params, strict=True))
        ]
        with tqdm.tqdm(total=len(jobs), desc="Prompts", unit="prompt", disable=not use_tqdm) as bar:
            _generate(self.engine, jobs, self.config.max_num_seqs + self.config.max_queue, bar)
        return [job.output for job in jobs]

    def _with_grammars(self, params: Sequence[SamplingParams]) -> list[SamplingParams]:
        made: list[SamplingParams] = []
        for index, one in enumerate(params):
            if index and one is params[index - 1]:
                one = made[-1]
            elif one.structured_outputs is not None:
                grammar = self._grammars.compile(one.structured_outputs)
                one = msgspec.structs.replace(one, grammar=grammar)
            made.append(one)
        return made


class _Job:
    """One prompt on its way: its engine requests and the texts that grow from them.

    Request ids are ``CALL-PROMPT-SAMPLE``. Raises ``InvalidRequest`` naming the prompt that cannot be served.
    """

    def __init__(
        self,
        renderer: PromptRenderer,
        index: int,
        text: str | None,
        ids: list[int],
        sampling: SamplingParams,
        engine: EngineCore,
        call: int,
    ) -> None:
        self.output = RequestOutput(text, ids, [CompletionOutput(i) for i in range(sampling.n)])
        self.samples = 1 if sampling.greedy else sampling.n  # greedy samples are all equal
        self.texts = [TextStream(renderer, ids, sampling) for _ in range(self.samples)]
        self.left = self.samples
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        limit = sampling.max_tokens or max(1, engine.max_tokens_after(len(ids)))
        alone = engine_params(sampling, renderer, seed=seed, max_tokens=limit)
        self.requests = [
            EngineRequest(
                request_id=f"{call}-{index}-{sample}",
                prompt_token_ids=ids,
                sampling=alone,
                sample_index=sample,
                group=f"{call}-{index}" if self.samples > 1 else None,
            )
            for sample in range(self.samples)
        ]
        try:
            engine.check(self.requests)
        except InvalidRequest as error:
            raise type(error)(f"prompts[{index}]: {error.message}", param=error.param) from error

    def take(self, sample: int, output: EngineOutput) -> bool:
        """Add an output. True when a stop string ended a sample with which the engine would go on."""
        completion = self.output.outputs[sample]
        delta = self.texts[sample].push(output.token_ids, output.finish_reason, output.stop_reason)
        completion.text += delta.text
        completion.token_ids += output.token_ids[: delta.num_tokens]
        if output.logprobs is not None:
            completion.logprobs = (completion.logprobs or []) + output.logprobs[: delta.num_tokens]
        if sample == 0:
            self.output.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self.output.prompt_logprobs = output.prompt_logprobs
        if output.cumulative_logprob is not None:
            completion.cumulative_logprob = output.cumulative_logprob
        if delta.finish_reason is None:
            return False
        completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_reason
        completion.error = output.error
        self.left -= 1
        if not self.left and self.samples < len(self.output.outputs):
            first = self.output.outputs[0]
            self.output.outputs = [
                msgspec.structs.replace(first, index=i, token_ids=list(first.token_ids))
                for i in range(len(self.output.outputs))
            ]
        return output.finish_reason is None


def _generate(engine: EngineCore, jobs: list[_Job], limit: int, bar: tqdm.tqdm[Any]) -> None:
    """Run the jobs to their end, at most ``limit`` requests in the engine at once (or one job). Leaves none
    behind.
    """
    pending = deque(jobs)
    running: dict[str, tuple[_Job, int]] = {}
    tokens, start = 0, time.monotonic()
    try:
        while pending or running:
            while pending and (not running or len(running) + pending[0].samples <= limit):
                job = pending.popleft()
                engine.add(job.requests)
                running |= {request.request_id: (job, i) for i, request in enumerate(job.requests)}
            outputs = engine.step()
            for _, error in engine.take_rejected():
                raise error
            for output in outputs:
                if output.request_id not in running:
                    continue  # the last output of one that a stop string had ended
                job, sample = running[output.request_id]
                tokens += len(output.token_ids)
                stopped = job.take(sample, output)
                if stopped:
                    engine.abort([output.request_id])
                if stopped or output.finish_reason is not None:
                    del running[output.request_id]
                    if not job.left:
                        bar.set_postfix_str(f"{tokens / (time.monotonic() - start):.1f} tok/s", refresh=False)
                        bar.update()
    finally:
        engine.abort(list(running))
