"""The program inside a runner: executes a task's or a candidate's code on the oracle's orders.

The same program plays the reference (it executes the task source and draws inputs) and the candidate.
Orders and replies are messages of `sandbox.jail.frames`; an order is {"command": ...}, a reply {"ok":
true, ...} or {"error": {"kind", "message"}}. In the middle of an order the candidate may ask the oracle to
build an extension (`sandbox.jail.extensions`). Everything here runs beside untrusted code, so the oracle
believes nothing it reads from a reply beyond what it can check itself.

    load_reference source entry_point dtype device seed      -> arguments, init (encoded), state names +
    tensors load_module    source entry_point dtype device language seed init
    connect        device                                    (opens it before there is anything to load)
    warm                                                     (and does once what is slow at its first use; after connect)
    load_kernel    outputs is_tuple device + state tensors   (the library is file descriptor 4)
    inputs         seed slot                                 -> args (encoded) + tensors    [reference only]
    open_arena     bytes + descriptor                        (shared device memory: see `sandbox.jail.arena`)
    set_inputs     slot args + tensors
    overwrite      slot tensor row + tensor                  (in place, in the buffers already used)
    run            slot seed check max_bytes                 -> outputs + tensors, changed, aliased
    run_double     slot seed max_bytes                       -> outputs in float64          [reference only]
    time_block     calls slots keep flush which              -> span_ms, host_ms
    kept           max_bytes                                 -> outputs of the call that was kept
    open_outputs   twice inputs_bytes + descriptor or none   -> pid, inputs         (memory for time_fresh's outputs, inputs)
    prepare_fresh  calls outputs                             ->                     (where time_fresh's inputs will lie)
    time_fresh     (see there)                               -> span_ms, warm_ms    [CPU only]
    time_copying   calls outputs + descriptor of the inputs  -> span_ms             [CPU only]
    prepare_arena  calls outputs record twice                -> recorded, refused              [with an arena only]
    time_launch                                              -> launch_ms           [after prepare_arena, reference only]
    time_arena     where                                     -> span_ms, warm_ms, left        [after prepare_arena]
    start_profiler                                           -> nothing; makes the next profile quick
    profile        slot                                      -> kernels, own, busy_ms
    count          slot                                      -> nothing; what it launches is marked for a profiler around this process
    work           slot                                      -> read_bytes, written_bytes, flops            [reference only]
    compile_report slot                                      -> report              [device "aot:sm_NN" only]
    forget                                                   (all inputs and kept outputs)
    memory                                                   -> device memory
    exit
"""

from __future__ import annotations

import copy
import inspect
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from sandbox.jail import arena, bulk, extensions, launchers
from sandbox.jail.arena_calls import ArenaCalls
from sandbox.jail.device import Device, make_device
from sandbox.jail.execution import RunnerError, describe_error, execute_source, seed_torch
from sandbox.jail.frames import Channel, ChannelClosed, Message
from sandbox.jail.fresh import DONE, FAILED, GO, READY, FreshCalls
from sandbox.jail.kernel_call import KernelCall
from sandbox.jail.tensors import DTYPES, decode, encode, pack, unpack

MAX_INPUT_BYTES = 8 << 30
MAX_FDS = 4
KERNEL_FD = 4


def main(channel_fd: int, nonce: str, file_fds: Sequence[int]) -> None:
    """Serves orders until `exit` or until the oracle closes the channel."""
    channel = Channel(socket.socket(fileno=channel_fd), nonce, max_fds=MAX_FDS, max_held_bytes=bulk.UNBOUNDED)
    conversation = extensions.Conversation(channel)
    extensions.install(conversation)
    launchers.install(conversation)
    runner = Runner(channel)
    while True:
        try:
            message = conversation.order(MAX_INPUT_BYTES)
        except ChannelClosed:
            return
        command = message.header["command"]
        if command == "exit":
            return
        try:
            reply, tensors = getattr(runner, f"do_{command}")(message)
            sent, buffers = runner.carry(tensors, wanted=message.header.get("reply_in_arena") is True)
        except BaseException as error:  # noqa: B036  (SystemExit from a candidate must not look like an orderly end)
            conversation.reply({"error": describe_error(error, stage=command)})
        else:
            conversation.reply({"ok": True, **reply, **sent}, buffers)


class Runner:
    """State of one runner: the callable under test, its input slots and its last outputs.

    Args:
      channel: for orders that say something before their reply.
    """

    def __init__(self, channel: Channel | None = None) -> None:
        self.channel = channel
        self.device: Device
        self.dtype = torch.float32
        self.call: Any = None
        self.module: Any = None
        self.slots: dict[int, list[Any]] = {}
        self.kept: Any = None
        self.copies: list[torch.Tensor] = []
        self.baselines: dict[str, Any] = {}
        self.arena: Any = None
        self.pool: Any = None
        self.refused = ""
        self.arena_calls: Any = None
        self.draws_on_device = False
        self.fresh: FreshCalls

    def carry(self, tensors: list[torch.Tensor], *, wanted: bool) -> tuple[dict, list[memoryview]]:
        """Fields and buffers of a reply with tensors, in the arena where that is wanted and they fit."""
        if wanted and self.arena is not None:
            entries = arena.write(self.arena.part("outputs"), tensors)
            if entries is not None:
                self.device.synchronize()
                return {"tensors": entries, "arena": True}, []
        entries, buffers = pack([self.device.to_host(tensor) for tensor in tensors] if tensors else [])
        return {"tensors": entries}, buffers

    def _received(self, message: Message) -> list[torch.Tensor]:
        """Tensors that came with an order; those in the arena are overwritten by the next order."""
        if message.header.get("arena") is True and self.arena is not None and "tensors" in message.header:
            return arena.read(self.arena.part("inputs"), message.header["tensors"])
        return unpack(message.header["tensors"], message.buffers)

    def do_load_reference(self, message: Message) -> tuple[dict, list[torch.Tensor]]:
        order = message.header
        self._open(order, language="")
        namespace = execute_source(order["source"], "task_reference", kind="task_rejected")
        missing = [
            name for name in (order["entry_point"], "get_inputs", "get_init_inputs") if name not in namespace
        ]
        if missing:
            raise RunnerError(
                "task_rejected",
                f"the task source does not define {', '.join(missing)}; a task needs a class "
                f"{order['entry_point']} and the functions get_inputs() and get_init_inputs()",
            )
        self.get_inputs = namespace["get_inputs"]
        self.draws_on_device = self.device.name != "cpu"
        seed_torch(order["seed"], self.device.name)
        init = namespace["get_init_inputs"]()
        self.device.setup()
        self._construct(namespace[order["entry_point"]], init, order["seed"])
        if not isinstance(self.module, torch.nn.Module):
            raise RunnerError("task_rejected", f"{order['entry_point']} is not a torch.nn.Module")
        parameters = [name for name in inspect.signature(self.module.forward).parameters]
        tensors: list[torch.Tensor] = []
        encoded = encode(init, tensors)
        state = [*self.module.named_parameters(), *self.module.named_buffers()]
        count = len(tensors)
        tensors += [tensor.detach() for _, tensor in state]
        names = [name for name, _ in state]
        return {"arguments": parameters, "init": encoded, "init_tensors": count, "state": names}, tensors

    def do_load_module(self, message: Message) -> tuple[dict, list[torch.Tensor]]:
        order = message.header
        self._open(order, language=order["language"])
        init = decode(order["init"], unpack(order["tensors"], message.buffers))
        refusal = self.device.refuse(order["source"], order["dtype"])
        if refusal:
            raise RunnerError("load_failed", refusal)
        namespace = execute_source(order["source"], "candidate_module", kind="load_failed")
        if order["entry_point"] not in namespace:
            raise RunnerError("load_failed", f"the source does not define {order['entry_point']}")
        self.device.setup()
        self._construct(namespace[order["entry_point"]], init, order["seed"])
        return {"honest_clock": self.device.honest_clock}, []

    def do_load_kernel(self, message: Message) -> tuple[dict, list[torch.Tensor]]:
        order = message.header
        self._open(order, language="cpp")
        self.device.setup()
        state = [tensor.clone() for tensor in unpack(order["tensors"], message.buffers)]
        outputs = [(DTYPES[entry["dtype"]], entry["shape"]) for entry in order["outputs"]]
        self.call = KernelCall(f"/proc/self/fd/{KERNEL_FD}", state, outputs, order["is_tuple"])
        return {"honest_clock": self.device.honest_clock}, []

    def do_inputs(self, message: Message) -> tuple[dict, list[torch.Tensor]]:
        self.slots[message.header["slot"]] = placed = self._drawn(message.header["seed"])
        tensors: list[torch.Tensor] = []
        encoded = encode(placed, tensors)
        return {"args": encoded}, tensors

    def _drawn(self, seed: int) -> list[Any]:
        """What the task's `get_inputs` returns, placed on the device, and drawn there unless the function can't or memory is short:
        millions of random numbers take a GPU no time and a core a tenth of a second."""
        if self.draws_on_device:
            seed_torch(seed, self.device.name)
            try:
                with torch.device(self.device.name):
                    args = self.get_inputs()
                return self._placed(args)
            except Exception:
                self.draws_on_device = False
                self.device.trim()
        seed_torch(seed, self.device.name)
        return self._placed(self.get_inputs())

    def _placed(self, args: Any) -> list[Any]:
        if not isinstance(args, (list, tuple)):
            raise RunnerError(
                "task_rejected", f"get_inputs() returned {type(args).__name__}, a list is needed"
            )
        return [self._place(self._cast(arg)) for arg in args]

    def do_open_arena(self, message: Message) -> tuple[dict, list[torch.Tensor]]:
        (fd,) = message.fds
        try:
            self.arena = arena.Arena.open(torch.device(self.device.name).index, fd, message.header["bytes"])
        finally:
            os.close(fd)
        return {}, []

    def do_set_inputs(self, message: Message) -> tuple[dict, list[torch.Tensor]]:
        args = decode(message.header["args"], self._received(message))
        self.slots[message.header["slot"]] = [self._place(arg) for arg in args]
        return {}, []

    def do_overwrite(self, message: Message) -> tuple[dict, list[torch.Tensor]]:
        (rows,) = self._received(message)
        tensors = [arg for arg in self.slots[message.header["slot"]] if isinstance(arg, torch.Tensor)]
        target = tensors[message.header["tensor"]]
        first = message.header["row"]
        target[first : first + len(rows)].copy_(rows)
        return {}, []

    def do_run(self, message: Message) -> tuple[dict, list[torch.Tensor]]:
        order = message.header
        args = self.slots[order["slot"]]
        inputs = [arg for arg in args if isinstance(arg, torch.Tensor)]
        before = self._copies(inputs) if order["check"] else []
        seed_torch(order["seed"], self.device.name)
        call = self.call.guarded if order["check"] and isinstance(self.call, KernelCall) else self.call
        with torch.no_grad():
            result = call(*args)
        self.device.synchronize()
        reply, tensors = self._outputs(result, order["max_bytes"])
        if order["check"]:
            reply["changed"] = [
                n for n, (a, b) in enumerate(zip(inputs, before, strict=True)) if not _same(a, b)
            ]
            outputs = [_extent(output) for output in _as_list(result) if isinstance(output, torch.Tensor)]
            reply["aliased"] = [
                n for n, area in enumerate(map(_storage, inputs)) if any(area[0] < last and first < area[1] for first, last in outputs)
            ]
        return reply, tensors

    def _copies(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of tensors, on a CPU in the memory of the copies before: to get new pages takes longer than to copy."""
        if self.device.name != "cpu":
            return [tensor.clone() for tensor in tensors]
        kinds = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if kinds != [(old.shape, old.dtype) for old in self.copies]:
            self.copies = [torch.empty(shape, dtype=dtype) for shape, dtype in kinds]
        return [old.copy_(tensor) for old, tensor in zip(self.copies, tensors, strict=True)]

    def do_run_double(self, message: Message) -> tuple[dict, list[torch.Tensor]]:
        order = message.header
        module = copy.deepcopy(self.module).double()
        seed_torch(order["seed"], self.device.name)
        with torch.no_grad():
            result = module(*_double(self.slots[order["slot"]]))
        self.device.synchronize()
        return self._outputs(result, order["max_bytes"])

    def do_time_block(self, message: Message) -> tuple[dict, list[torch.Tensor]]:
        order = message.header
        slots = [self.slots[slot] for slot in order["slots"]]
        call = self.call if order["which"] == "eager" else self._baseline(order["which"])
        with torch.no_grad():
            block = self.device.time_block(
                call,
                order["calls"],
                lambda index: slots[index % len(slots)],
                keep=order["keep"],
                flush=order["flush"],
            )
        if order["keep"] is not None:
            self.kept = block.kept
        return {"span_ms": block.span_ms, "host_ms": block.host_ms}, []

    def do_kept(self, message: Message) -> tuple[dict, list[torch.Tensor]]:
        reply, tensors = self._outputs(self.kept, message.header["max_bytes"])
        self.kept = None
        return reply, tensors

    def do_open_outputs(self, message: Message) -> tuple[dict, list[torch.Tensor]]:
        order = message.header
        self.fresh = FreshCalls(message.fds[0] if message.fds else None, inputs_bytes=order["inputs_bytes"], twice=order["twice"])
        return {"pid": os.getpid(), "inputs": self.fresh.inputs.data_ptr()}, []

    def do_prepare_fresh(self, message: Message) -> tuple[dict, list[torch.Tensor]]:
        self.fresh.prepare(message.header["calls"], message.header["outputs"])
        return {}, []

    def do_time_fresh(self, message: Message) -> tuple[dict, list[torch.Tensor]]:
        """Says READY, waits for GO, does the calls, and says DONE with where their outputs lie; each time the oracle stops this
        process for a moment."""
        assert self.channel is not None
        self.channel.put(READY)
        self.channel.take(len(GO))
        try:
            with torch.no_grad():
                span_ms = self.fresh.time(self.call)
            done = DONE + self.fresh.places()
        except BaseException:
            self.channel.put(FAILED)
            raise
        self.channel.put(done)
        with torch.no_grad():
            self.fresh.again(self.call)
        return {"span_ms": span_ms, "warm_ms": self.fresh.warm_ms}, []

    def do_time_copying(self, message: Message) -> tuple[dict, list[torch.Tensor]]:
        order = message.header
        with torch.no_grad():
            span_ms = self.fresh.time_copying(self.call, message.fds[0], order["calls"], order["outputs"])
        return {"span_ms": span_ms}, []

    def do_prepare_arena(self, message: Message) -> tuple[dict, list[torch.Tensor]]:
        order = message.header
        self.arena_calls = None
        if self.pool is None:
            self.pool = self.device.open_pool(self.arena.part("pool"))
        else:
            self.pool.renew()
        inputs, results = self.arena.part("inputs"), self.arena.part("outputs")
        prepared = []
        for call in order["calls"]:
            places = [{**entry, "offset": call["offset"] + entry["offset"]} for entry in order["outputs"]]
            tensors = arena.read(inputs, call["tensors"])
            prepared.append((decode(call["args"], tensors), tensors, arena.read(results, places)))
        with torch.no_grad():
            calls = self.arena_calls = ArenaCalls(
                self.device, self.call, prepared, self.arena.memory, self.pool, twice=order["twice"],
                record=order["record"] and not self.refused,  # once: the next would be refused as well
            )  # fmt: skip
        self.refused = self.refused or calls.refused
        refused = self.refused if order["record"] else ""
        return {"recorded": calls.recorded, "refused": refused}, []

    def do_time_launch(self, message: Message) -> tuple[dict, list[torch.Tensor]]:
        with torch.no_grad():
            return {"launch_ms": self.arena_calls.launch_ms()}, []

    def do_time_arena(self, message: Message) -> tuple[dict, list[torch.Tensor]]:
        with torch.no_grad():
            span_ms = self.arena_calls.time()
        # A recording leaves its outputs in the same places every time; to say so again takes longer than short calls.
        left = self.arena_calls.left if message.header["where"] or not self.arena_calls.recorded else None
        return {"span_ms": span_ms, "warm_ms": self.arena_calls.warm_ms, "left": left}, []

    def do_start_profiler(self, message: Message) -> tuple[dict, list[torch.Tensor]]:
        self.device.start_profiler()
        return {}, []

    def do_profile(self, message: Message) -> tuple[dict, list[torch.Tensor]]:
        with torch.no_grad():
            samples = self.device.profile(self.call, self.slots[message.header["slot"]])
        own = self.device.own_kernels()
        return {
            "kernels": [asdict(sample) for sample in samples],
            "own": [asdict(kernel) for kernel in own],
            "busy_ms": self.device.busy_ms,
        }, []

    def do_count(self, message: Message) -> tuple[dict, list[torch.Tensor]]:
        with torch.no_grad():
            self.device.marked(self.call, self.slots[message.header["slot"]])
        return {}, []

    def do_work(self, message: Message) -> tuple[dict, list[torch.Tensor]]:
        from sandbox.jail.work import count_work

        with torch.no_grad():
            found = count_work(self.call, self.slots[message.header["slot"]], [*self.module.parameters(), *self.module.buffers()])
        self.device.synchronize()
        return found, []

    def do_compile_report(self, message: Message) -> tuple[dict, list[torch.Tensor]]:
        with torch.no_grad():
            report = self.device.compile_report(self.call, self.slots[message.header["slot"]])
        return {"report": report.to_json()}, []

    def do_forget(self, message: Message) -> tuple[dict, list[torch.Tensor]]:
        self.slots.clear()
        self.kept = self.arena_calls = None
        self.device.trim()
        return {}, []

    def do_memory(self, message: Message) -> tuple[dict, list[torch.Tensor]]:
        return self.device.memory_info(), []

    def do_connect(self, message: Message) -> tuple[dict, list[torch.Tensor]]:
        self.device = make_device(message.header["device"], language="")
        self.device.before_load()
        self.device.connect()
        return {}, []

    def do_warm(self, message: Message) -> tuple[dict, list[torch.Tensor]]:
        self.device.warm_up()
        return {}, []

    def _open(self, order: dict[str, Any], language: str) -> None:
        warm = getattr(self, "device", None)
        if warm is not None and warm.name == order["device"]:
            warm.language = language
        else:
            self.device = make_device(order["device"], language=language)
        self.dtype = DTYPES[order.get("dtype", "float32")]
        self.device.before_load()

    def _construct(self, model_class: Any, init: Any, seed: int) -> None:
        seed_torch(seed, self.device.name)
        module = model_class(*init)
        if isinstance(module, torch.nn.Module):
            module = module.to(device=self.device.name, dtype=self.dtype)
        self.module = self.call = module

    def _baseline(self, which: str) -> Any:
        if which not in self.baselines:
            if which != "torch.compile":
                raise RunnerError("runtime_error", f"unknown baseline {which!r}")
            self.baselines[which] = torch.compile(self.module)
        return self.baselines[which]

    def _cast(self, arg: Any) -> Any:
        if isinstance(arg, torch.Tensor) and arg.is_floating_point():
            return arg.to(self.dtype)
        return arg

    def _place(self, arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            return self.device.to_device(arg)
        if isinstance(arg, (list, tuple)):
            return type(arg)(self._place(item) for item in arg)
        return arg

    def _outputs(self, result: Any, max_bytes: int) -> tuple[dict, list[torch.Tensor]]:
        outputs = _as_list(result)
        for number, output in enumerate(outputs):
            if type(output) not in (torch.Tensor, torch.nn.Parameter):
                raise RunnerError(
                    "wrong_output", f"output {number} is a {type(output).__name__}, a torch.Tensor is needed"
                )
            if output.layout is not torch.strided:
                raise RunnerError("wrong_output", f"output {number} has the layout {output.layout}, a strided tensor is needed")
        where = {str(output.device) for output in outputs} - {str(torch.device(self.device.name))}
        if where:
            raise RunnerError(
                "wrong_output", f"an output lies on {where.pop()} instead of {self.device.name}"
            )
        reply = {
            "shapes": [list(output.shape) for output in outputs],
            "dtypes": [str(output.dtype) for output in outputs],
            "is_tuple": isinstance(result, (list, tuple)),
        }
        if sum(output.numel() * output.element_size() for output in outputs) > max_bytes:
            return {**reply, "too_large": True}, []
        return reply, [output.detach() for output in outputs]


def _as_list(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    """Where the memory that a tensor is a part of begins and ends."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor's own elements begin and end, however it came by them; nowhere without elements."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _double(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value.clone()
    return type(value)(map(_double, value)) if isinstance(value, (list, tuple)) else value


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    left, right = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right))
    if all(tensor.numel() % 8 == tensor.storage_offset() % 8 == 0 for tensor in (left, right)):
        left, right = left.view(torch.int64), right.view(torch.int64)  # six times faster
    return torch.equal(left, right)
