"""What a server remembers: evaluations, the requests that asked for them, and verdicts by content. All of it is bounded."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from sandbox.protocol import ArmSamples, EvaluationResult, VerificationArm, VerificationDecision, VerificationResult
from sandbox.records import KeyConflict, Record, UnknownId
from sandbox.verification import Asked

CACHED_VERDICTS = 20_000
KEPT_RECORDS = 50_000
KEPT_KEYS = 10_000

Arms = list[tuple[list[str], list[str]]]
"""Of a verification: ids of control and treated candidates, arm by arm."""


class Ledger:
    """Evaluations, verifications, clients' keys and verdicts; the oldest go first."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._verdicts: OrderedDict[str, EvaluationResult] = OrderedDict()
        self._keys: OrderedDict[str, tuple[str, Any]] = OrderedDict()
        self._verifications: OrderedDict[str, tuple[Arms, Asked | None]] = OrderedDict()
        self._decisions: OrderedDict[str, tuple[VerificationDecision, list[list[ArmSamples]]]] = OrderedDict()

    def add(self, record: Record) -> None:
        """Keeps a new evaluation; forgets the oldest that is done."""
        self._records[record.id] = record
        while len(self._records) > KEPT_RECORDS:
            oldest = next(iter(self._records.values()))
            if not oldest.done.is_set():
                return
            del self._records[oldest.id]

    def record(self, evaluation_id: str) -> Record:
        """Raises UnknownId."""
        record = self._records.get(evaluation_id)
        if record is None:
            raise UnknownId(evaluation_id)
        return record

    def find(self, evaluation_id: str) -> Record | None:
        """None for an id that is not known."""
        return self._records.get(evaluation_id)

    def unfetched(self) -> list[Record]:
        """Evaluations whose results nobody has been given, be they done or not."""
        return [record for record in self._records.values() if not record.fetched]

    def add_verification(self, verification_id: str, arms: Arms, asked: Asked | None = None) -> None:
        """Keeps a new verification, and what is to be decided about it."""
        self._verifications[verification_id] = arms, asked
        _bound(self._verifications, KEPT_KEYS)

    def arms(self, verification_id: str) -> Arms:
        """Raises UnknownId."""
        return self._verification(verification_id)[0]

    def verification(self, verification_id: str) -> VerificationResult:
        """All results of a verification as they are now, with its decision if `keep_decision` has had it. Raises UnknownId."""
        arms = [
            VerificationArm(control=[self.record(one).result for one in control], treated=[self.record(one).result for one in treated])
            for control, treated in self.arms(verification_id)
        ]
        states = {result.state for arm in arms for result in (*arm.control, *arm.treated)}
        state = "done" if states == {"done"} else "queued" if states == {"queued"} else "running"
        decision, samples = self._decisions.get(verification_id, (None, []))
        return VerificationResult(id=verification_id, state=state, arms=arms, decision=decision, samples=samples)

    def undecided(self, verification_id: str) -> Asked | None:
        """What is still to be decided about a verification, None if nothing is. Raises UnknownId."""
        return None if verification_id in self._decisions else self._verification(verification_id)[1]

    def keep_decision(self, result: VerificationResult) -> None:
        """Keeps the decision on a verification that is done; it does not change any more."""
        self._decisions[result.id] = result.decision, result.samples
        _bound(self._decisions, KEPT_KEYS)

    def _verification(self, verification_id: str) -> tuple[Arms, Asked | None]:
        found = self._verifications.get(verification_id)
        if found is None:
            raise UnknownId(verification_id)
        return found

    def answer(self, client_key: str | None, body: str) -> Any:
        """What the request with this key was answered, None if there was none.

        Args:
          body: digest of the request.

        Raises:
          KeyConflict: it was another request.
        """
        if client_key is None or client_key not in self._keys:
            return None
        known_body, answer = self._keys[client_key]
        if isinstance(answer, list) and not all(one in self._records for one in answer):
            # Older than what is kept: to answer with dead ids would help nobody.
            return None
        if known_body != body:
            raise KeyConflict(f"client_key {client_key!r} was used before with another request")
        return answer

    def remember_answer(self, client_key: str | None, body: str, answer: Any) -> None:
        if client_key is not None:
            self._keys[client_key] = (body, answer)
            _bound(self._keys, KEPT_KEYS)

    def verdict(self, content: str) -> EvaluationResult | None:
        """The verdict on this content, if it was judged before."""
        verdict = self._verdicts.get(content)
        if verdict is not None:
            self._verdicts.move_to_end(content)
        return verdict

    def keep_verdict(self, content: str, result: EvaluationResult) -> None:
        self._verdicts[content] = result
        _bound(self._verdicts, CACHED_VERDICTS)


def _bound(entries: OrderedDict[str, Any], most: int) -> None:
    while len(entries) > most:
        entries.popitem(last=False)
