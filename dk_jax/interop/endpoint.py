"""Asks a model behind an OpenAI-compatible endpoint (`POST {base_url}/chat/completions`), within limits of rate, money and patience.

    with Endpoint(EndpointConfig(base_url="http://localhost:8000/v1", model="m"), AnswerJournal(path)) as endpoint:
        [answer] = endpoint.ask([ChatRequest(messages=(("user", "Hello"),), max_tokens=256)])

Every answer goes to an append-only journal the moment it arrives, so that an interrupted run asks nothing twice. What can pass by itself
(timeouts, 429, 5xx, lost connections, garbage) is asked again with growing pauses; a request that is wrong, or a key that is refused, ends
the work at once. Transport is the `openai` library's, imported with the first question. Not here: streaming, tools, images.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import datetime
import email.utils
import json
import logging
import math
import os
import random
import re
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from dk_jax.interop.answers import Answer, AnswerJournal, ChatRequest, estimate_tokens
from dk_jax.interop.rate_limits import Clock, EndpointError, EndpointRefused, EndpointUnavailable, RateLimiter

__all__ = [
    "Answer", "AnswerJournal", "ChatRequest", "Clock", "Endpoint", "EndpointConfig", "EndpointError", "EndpointRefused", "EndpointUnavailable",
    "RateLimiter", "Tally", "estimate_tokens",
]  # fmt: skip

log = logging.getLogger(__name__)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Between tries; doubled each time, less up to a half at random so that clients do not come back together."""
LOOK_S = 0.5
SHORTEST_SECRET_CHARS = 12  # a shorter key ("none", "EMPTY") is no secret, and blotted out of texts it might be an ordinary word of theirs
UNASKED, UNANSWERED = "budget", "unanswered"
"""Problems of an `Answer` that no journal holds: the budget had no room for it, or every try failed."""
_TOO_LONG = re.compile(r"context[ _](?:length|window)|maximum context|prompt is too long|too many (?:input )?tokens", re.IGNORECASE)
_ADVICE = {
    401: "the key is wrong or has expired: look at the environment variable {env}",
    402: "the account has no credit left",
    403: "the key of {env} may not use this model",
    404: "there is no such model or address: base_url usually ends in /v1",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """An endpoint and what may be asked of it.

    Attributes:
        base_url: up to "/chat/completions", usually ending in "/v1".
        api_key_env: environment variable that holds the key, "" for an endpoint that wants none. The key is in no file and no message.
        parallel: requests in flight at once.
        requests_per_minute, tokens_per_minute: in any 60 s; 0 for no limit. A request counts with its prompt and the longest answer it may
            get until its usage is known.
        deadline_s: of one try, from sending to the whole answer. retries: further tries of a request.
        give_up_after: so many requests in a row whose every try failed end the work, as does a Retry-After beyond longest_wait_s.
        price_in, price_out: of a million prompt and completion tokens, in any currency; None if unknown.
        budget, budget_tokens: what may be spent in all, the journal's answers included; None for no bound. A request begins only if its
            prompt, by estimate, and the longest answer it may get still fit.
        max_tokens_field: "max_tokens", or "max_completion_tokens" where the endpoint wants that.
    """

    base_url: str
    model: str
    api_key_env: str = "OPENAI_API_KEY"
    parallel: int = 8
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    deadline_s: float = 600.0
    retries: int = 6
    give_up_after: int = 3
    longest_wait_s: float = 600.0
    price_in: float | None = None
    price_out: float | None = None
    budget: float | None = None
    budget_tokens: int | None = None
    max_tokens_field: str = "max_tokens"

    def __post_init__(self):
        url = urlsplit(self.base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"base_url {self.base_url!r} is no http(s) address; it looks like https://host/v1")
        if url.username or url.password or url.query or url.fragment:
            raise ValueError(f"base_url of {url.hostname}: leave out user, password and query; a key belongs in an environment variable")
        if not self.model:
            raise ValueError("model is empty: name one of the endpoint's models")
        for name, least in {"parallel": 1, "give_up_after": 1, "retries": 0, "requests_per_minute": 0, "tokens_per_minute": 0, "deadline_s": 0,
                            "longest_wait_s": 0, "price_in": 0, "price_out": 0, "budget": 0, "budget_tokens": 0}.items():  # fmt: skip
            if (value := getattr(self, name)) is not None and not least <= value < math.inf:
                raise ValueError(f"{name} is {value}: it must be a number >= {least}")
        if self.budget is not None and (self.price_in is None or self.price_out is None):
            raise ValueError("a budget in money needs price_in and price_out, of a million tokens each; without them bound the tokens")

    @property
    def host(self) -> str:
        """Host and port: all of the address that is stored anywhere."""
        return urlsplit(self.base_url).netloc

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float | None:
        """In the currency of the prices; None without prices."""
        known = self.price_in is not None and self.price_out is not None
        return (prompt_tokens * self.price_in + completion_tokens * self.price_out) / 1e6 if known else None


@dataclasses.dataclass(kw_only=True)
class Tally:
    """What an `Endpoint` did; of these `spent` and `spent_tokens` count the journal's earlier answers too.

    Attributes:
        requests: sent, tries included. answered: of them, with an answer. replayed: answers from the journal.
        unbilled: tries without an answer (timeout, 5xx, garbage), whose cost nobody told.
        estimated: answers without usage. problems: of answers and tries, by name.
    """

    requests: int = 0
    answered: int = 0
    replayed: int = 0
    unbilled: int = 0
    estimated: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    spent_tokens: int = 0
    spent: float = 0.0
    problems: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


class _Failed(Exception):
    """A try without a usable answer, where another one may help; not before `wait_s` if the endpoint says so."""

    def __init__(self, problem: str, detail: str, *, wait_s: float = 0.0):
        super().__init__(f"{problem}: {detail}")
        self.problem, self.wait_s = problem, wait_s


class Endpoint:
    """Asks questions, many at once; threads may share it. Use as a context manager, or `close` it.

    Args:
        journal: where answers go, and are looked for first; None keeps nothing.
        clock, rng: of pauses and rates, and of their randomness.

    Raises:
        EndpointError: the environment variable of the key is not set, or holds none.
    """

    def __init__(self, config: EndpointConfig, journal: AnswerJournal | None, *, clock: Clock | None = None, rng: random.Random | None = None):
        self.config, self.journal, self.tally = config, journal, Tally()
        if journal is not None:
            self.tally.spent_tokens, self.tally.spent = journal.spent_tokens, journal.spent
        self._key = os.environ.get(config.api_key_env, "").strip() if config.api_key_env else "none"
        if not (self._key and self._key.isascii() and self._key.isprintable()):
            said = "characters that no key has" if self._key else f"no key for {config.host}"
            raise EndpointError(f"the environment variable {config.api_key_env} holds {said}: set it, or name another one")
        self._clock, self._rng = clock or Clock(), rng or random.Random()
        self._limiter = RateLimiter(requests_per_minute=config.requests_per_minute, tokens_per_minute=config.tokens_per_minute)
        self._in_flight: list[tuple[int, float]] = []  # tokens and money that each request may come to
        self._open: dict[str, asyncio.Task[Answer]] = {}
        self._failures = 0  # requests in a row whose every try failed
        self._over: EndpointError | None = None  # why nothing more is asked
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, requests: Sequence[ChatRequest]) -> list[Answer]:
        """Answers in the order of the requests, from the journal where they are there.

        Raises:
            EndpointRefused, EndpointUnavailable: see there. Requests in flight are waited for and kept; none begins any more.
        """
        keys = [request.key(self.config.model) for request in requests]
        found = {key: answer for key in keys if self.journal is not None and (answer := self.journal.get(key)) is not None}
        with self._starting:
            self.tally.replayed += len(found)
        if missing := {key: request for key, request in zip(keys, requests, strict=True) if key not in found}:
            asked = asyncio.run_coroutine_threadsafe(self._ask_all(missing), self._started())
            try:
                while concurrent.futures.wait([asked], timeout=LOOK_S).not_done:
                    pass  # an interrupt that came the moment before the wait is seen here
                found |= asked.result()
            except concurrent.futures.CancelledError:
                raise EndpointError("the questions were given up") from None
        return [found[key] for key in keys]

    def abort(self) -> None:
        """Gives up what is in flight: calls that threads are in, and later ones, raise EndpointError."""
        self._over = self._over or EndpointError("the questions were given up")
        if self._loop is not None:
            self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._open.values()])

    def close(self) -> None:
        """Ends it; like `abort` where something is in flight."""
        self.abort()
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._closed(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._loop = None

    async def _closed(self) -> None:
        await asyncio.gather(*self._open.values(), return_exceptions=True)
        await self._client.close()

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                import openai

                c, self._openai = self.config, openai
                self._client = openai.AsyncOpenAI(base_url=c.base_url, api_key=self._key, max_retries=0, timeout=c.deadline_s)
                self._slots, self._queue, self._settled = asyncio.Semaphore(c.parallel), asyncio.Lock(), asyncio.Condition()
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="endpoint", daemon=True)
                self._thread.start()
            return self._loop

    async def _ask_all(self, requests: Mapping[str, ChatRequest]) -> dict[str, Answer]:
        for key, request in requests.items():
            if key not in self._open:
                self._open[key] = task = asyncio.create_task(self._answer(key, request))
                task.add_done_callback(lambda _, key=key: self._open.pop(key, None))
        results = await asyncio.gather(*(self._open[key] for key in requests), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return dict(zip(requests, results, strict=True))

    async def _answer(self, key: str, request: ChatRequest) -> Answer:
        """An answer, after as many tries as it takes or may take."""
        c = self.config
        if self.journal is not None and (known := self.journal.get(key)) is not None:
            return known  # it came since the journal was looked into
        for tried in range(c.retries + 1):
            try:
                answer = await self._try(key, request, last=tried == c.retries)
                self._failures = 0 if answer.problem != UNASKED else self._failures
                return answer
            except _Failed as failed:
                self.tally.problems[failed.problem] += 1
                self.tally.unbilled += failed.problem != "empty"
                last = failed
            except EndpointError as error:
                self._over = self._over or error
                raise
            if tried < c.retries:
                pause_s = min(FIRST_PAUSE_S * 2**tried, LONGEST_PAUSE_S) * self._rng.uniform(0.5, 1.0)
                log.info("%s: %s; asking again in %.1f s", c.host, last, max(pause_s, last.wait_s))
                await self._clock.sleep(max(pause_s, last.wait_s))
        self._failures += 1
        if self._failures < c.give_up_after:
            return self._noted(Answer(key=key, model=c.model, problem=UNANSWERED, detail=str(last)))
        self._over = EndpointUnavailable(
            f"{c.host} gave no usable answer to {self._failures} requests in a row, {c.retries + 1} tries each; the last: {last}. What came is "
            "kept: try again later"
        )
        raise self._over

    async def _try(self, key: str, request: ChatRequest, *, last: bool) -> Answer:
        prompt_tokens = sum(estimate_tokens(text) + 4 for _, text in request.messages)
        most = prompt_tokens + request.max_tokens
        reserved = most, self.config.cost(prompt_tokens, request.max_tokens) or 0.0
        async with self._slots:
            if not await self._afford(reserved):
                return self._noted(Answer(key=key, model=self.config.model, problem=UNASKED, detail="the budget has no room for this request"))
            self._in_flight.append(reserved)
            try:
                async with self._queue:  # first come, first served
                    while self._over is None and (delay_s := self._limiter.delay_s(self._clock.now(), most)) > 0:
                        await self._clock.sleep(delay_s)
                    if self._over is not None:
                        raise type(self._over)(str(self._over))
                    entry = self._limiter.begin(self._clock.now(), most)
                body = await self._post(request)
                if isinstance(body, Answer):
                    return self._keep(dataclasses.replace(body, key=key))
                return self._read(key, prompt_tokens, body, entry, last=last)
            finally:
                async with self._settled:
                    self._in_flight.remove(reserved)
                    self._settled.notify_all()

    async def _afford(self, reserved: tuple[int, float]) -> bool:
        """Whether the budget has room, once that is known: what is in flight may come to less than it may cost at most."""
        c = self.config
        async with self._settled:
            while True:
                tokens = self.tally.spent_tokens + sum(n for n, _ in self._in_flight) + reserved[0]
                money = self.tally.spent + sum(m for _, m in self._in_flight) + reserved[1]
                if not (c.budget_tokens is not None and tokens > c.budget_tokens) and not (c.budget is not None and money > c.budget):
                    return True
                if not self._in_flight:
                    return False
                await self._settled.wait()

    async def _post(self, request: ChatRequest) -> str | Answer:
        """The body of a reply; an `Answer` where the endpoint will not answer this question at all."""
        c = self.config
        drawn = {"temperature": request.temperature, "top_p": request.top_p, c.max_tokens_field: request.max_tokens}
        messages = [{"role": role, "content": text} for role, text in request.messages]
        body = {name: value for name, value in drawn.items() if value is not None} | dict(request.extra)
        self.tally.requests += 1
        try:
            async with asyncio.timeout(c.deadline_s):
                ask = self._client.chat.completions.with_raw_response.create
                raw = await ask(model=c.model, messages=messages, extra_body=body)
                return self._without_key(raw.http_response.content.decode("utf-8", "replace"))
        except self._openai.APIStatusError as error:
            return self._refusal(error)
        except (TimeoutError, self._openai.APITimeoutError):
            raise _Failed("timeout", f"no answer within {c.deadline_s:g} s") from None
        except self._openai.APIConnectionError as error:
            raise _Failed("connection", self._said(error.__cause__ or error)) from None

    def _refusal(self, error: Any) -> Answer:
        """What an HTTP status means: the answer to this question alone, or an exception for a pause or for the end."""
        status, said, c = error.status_code, self._said(error), self.config
        if status in (400, 413, 422) and (error.code == "context_length_exceeded" or _TOO_LONG.search(said)):
            return Answer(key="", model=c.model, problem="too_long", detail=said)
        if status in (400, 422) and error.code in ("content_filter", "content_policy_violation"):
            return Answer(key="", model=c.model, problem="content_filter", detail=said)
        if (status in (408, 409, 425, 429) or status >= 500) and error.code != "insufficient_quota":
            wait_s = _retry_after_s(error.response.headers)
            if wait_s > c.longest_wait_s:
                raise EndpointUnavailable(f"{c.host} answers {status} and wants {wait_s:.0f} s to pass ({said}): try again then; what came is kept")
            self._limiter.close_until(self._clock.now() + wait_s)
            raise _Failed(f"status {status}", said, wait_s=wait_s)
        advice = _ADVICE.get(status, "see what it says").format(env=c.api_key_env or "(none)")
        raise EndpointRefused(f"{c.host} refuses the request for model {c.model!r} with status {status}: {said} ({advice})")

    def _read(self, key: str, prompt_tokens: int, body: str, entry: list[float], *, last: bool) -> Answer:
        """The answer in a reply, kept; raises _Failed for one that is of no use. The last try's empty answer is what the model says."""
        text, finish, said, usage = _parse(body)
        estimated = usage is None
        prompt_tokens, completion_tokens = usage or (prompt_tokens, estimate_tokens(said))
        entry[1] = prompt_tokens + completion_tokens
        problem = finish if finish in ("length", "content_filter") else "" if text.strip() else "empty"
        answer = Answer(
            key=key, model=self.config.model, text=text, finish=finish, problem=problem, detail=f"finish_reason {finish!r}" if problem else "",
            prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, estimated=estimated,
            cost=self.config.cost(prompt_tokens, completion_tokens),
        )  # fmt: skip
        if problem == "empty" and not last:
            self._keep(answer, kept=False)
            raise _Failed(problem, answer.detail)
        return self._keep(answer)

    def _keep(self, answer: Answer, *, kept: bool = True) -> Answer:
        answer = dataclasses.replace(answer, date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
        if self.journal is not None:
            self.journal.put(answer, kept=kept)
        t, tokens = self.tally, answer.prompt_tokens + answer.completion_tokens
        t.answered += 1
        t.estimated += answer.estimated
        t.prompt_tokens += answer.prompt_tokens
        t.completion_tokens += answer.completion_tokens
        t.cost += answer.cost or 0.0
        t.spent_tokens, t.spent = t.spent_tokens + tokens, t.spent + (answer.cost or 0.0)
        return self._noted(answer) if kept and answer.problem else answer

    def _noted(self, answer: Answer) -> Answer:
        """Counts an answer's problem, and says the first of each kind."""
        if not self.tally.problems[answer.problem]:
            log.warning("%s: a question has no whole answer (%s): %s", self.config.host, answer.problem, answer.detail)
        self.tally.problems[answer.problem] += 1
        return answer

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "[key]") if len(self._key) >= SHORTEST_SECRET_CHARS else text

    def _said(self, error: BaseException) -> str:
        """An error's message in one line of bounded length, without the key, whoever quoted it."""
        return " ".join(self._without_key(str(getattr(error, "message", "") or error or type(error).__name__)).split())[:300]


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """Seconds that a reply's Retry-After asks for, as a number or as a date; 0 without one that can be read."""
    value = headers.get("retry-after", "")
    try:
        return max(float(value), 0.0)
    except ValueError:
        pass
    try:
        return max(email.utils.parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except (ValueError, TypeError):
        return 0.0


def _parse(body: str) -> tuple[str, str, str, tuple[int, int] | None]:
    """Text, finish_reason, all that was written (reasoning that is not part of the text, too), and tokens of a reply. Raises _Failed."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        raise _Failed("not_json", f"the reply is no JSON: {' '.join(body[:120].split())!r}") from None
    choices = data.get("choices") if isinstance(data, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    message = choice.get("message")
    if not isinstance(message, dict):
        raise _Failed("no_choices", f"the reply holds no message: {' '.join(body[:200].split())}")
    text = message.get("content")
    if isinstance(text, list):  # in parts
        text = "".join(part["text"] for part in text if isinstance(part, dict) and isinstance(part.get("text"), str))
    text = text if isinstance(text, str) else ""
    apart = [message[name] for name in ("reasoning_content", "reasoning") if isinstance(message.get(name), str)][:1]
    usage = data.get("usage")
    counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")] if isinstance(usage, dict) else []
    told = len(counts) == 2 and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in counts)
    return text, str(choice.get("finish_reason") or ""), " ".join([text, *apart]), tuple(counts) if told else None
