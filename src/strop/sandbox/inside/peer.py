"""Two processes that use each other's objects over a socket: plain data is copied, everything else stays where it is.

One side serves a program, the other runs the tests of it. Each message is a length and JSON. While a side waits for an
answer it answers what it is asked, so a function that a test hands to the program can be called by it.

The program may lie. What the tests see of it is plain data, which is made of Python's own types, and `Remote` objects,
with which it can decide as little as possible: see `Remote`. Of the tests' objects it can call and iterate those that
it was handed, and nothing else.
"""

from __future__ import annotations

import builtins
import json
import operator
import os
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import plain

LONGEST_MESSAGE = 16 << 20
"""Bytes of one message."""

ARITHMETIC = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift",
)  # fmt: skip
COMPARISONS = ("eq", "lt", "le", "gt", "ge")

OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "call": lambda function, *arguments, **keywords: function(*arguments, **keywords),
    "get": getattr,
    "set": setattr,
    "item": operator.getitem,
    "put": operator.setitem,
    "drop": operator.delitem,
    "contains": operator.contains,
    "is a": isinstance,
    "enter": lambda manager: manager.__enter__(),
    "exit": lambda manager: manager.__exit__(None, None, None),
    **{function.__name__: function for function in (len, iter, next, str, repr, bool, int, float, abs, hash, round)},
    **{name: getattr(operator, f"__{name}__") for name in (*ARITHMETIC, *COMPARISONS, "neg")},
}
PREDICATES = frozenset(
    name
    for kind in (str, bytes, set, float)
    for name in dir(kind)
    if name.startswith("is") or name in ("startswith", "endswith")
)
"""Methods by which Python's own types say yes or no."""
HARMLESS = frozenset({"call", "iter", "next"})
"""What a program may do with the objects of its tests."""


class Peer:
    """One end of the channel.

    Args:
        channel: file descriptor of a stream socket.
        allowed: operations on own objects that the other side may ask for.
        home: module whose classes are never copied as plain data, though they derive from a plain type.
        named: classes of the other side that this side knows by name.
    """

    def __init__(
        self, channel: int, *, allowed: frozenset[str], home: str = "", named: frozenset[str] = frozenset()
    ) -> None:
        self._channel = channel
        self._allowed = allowed
        self._home = home
        self.named = named
        self.answers: dict[str, Callable[..., Any]] = {}
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._remotes: dict[int, Remote] = {}
        self._errors: dict[tuple[str, str], type[Exception]] = {}

    # --- asking ---

    def ask(self, operation: str, *arguments: Any, **keywords: Any) -> Any:
        """Have the other side do something and give what it returns, or raise what it raises."""
        message = {
            "do": operation,
            "with": [plain.encode(item, self._export) for item in arguments],
            "and": {key: plain.encode(item, self._export) for key, item in keywords.items()},
        }
        self._send(message)
        while True:
            answer = self._receive()
            if answer is None:
                self._gone("the program ended while it was being tested")
            if "do" in answer:
                self._answer(answer)
                continue
            try:
                if "raised" in answer:
                    raise self._as_error(answer["raised"])
                value = plain.decode(answer["value"], self._import)
                self._apply(arguments, answer.get("changed", ()))
            except (ValueError, TypeError, KeyError, LookupError, RecursionError) as error:
                if isinstance(error, FromProgram):
                    raise
                self._gone(f"the program wrote something that is no answer ({type(error).__name__})")
            return value

    @staticmethod
    def _apply(arguments: tuple[Any, ...], changes: Any) -> None:
        """Make the same changes to arguments as were made to the copies of them."""
        for index, data in changes:
            old, new = arguments[index], plain.decode(data)
            if type(old) is not type(new):
                raise ValueError("another type")
            if isinstance(old, list | bytearray):
                old[:] = new
            elif isinstance(old, dict | set):
                old.clear()
                old.update(new)

    # --- answering ---

    def serve(self) -> None:
        """Answer until the other side closes the channel."""
        while (message := self._receive()) is not None:
            self._answer(message)

    def _answer(self, message: Mapping[str, Any]) -> None:
        answer: dict[str, Any] = {}
        try:
            name = message["do"]
            act = self.answers.get(name) or (OPERATIONS[name] if name in self._allowed else None)
            if act is None:
                raise PermissionError(f"{name} is not allowed here")
            arguments = [plain.decode(item, self._import) for item in message["with"]]
            keywords = {key: plain.decode(item, self._import) for key, item in message["and"].items()}
            answer["value"] = plain.encode(act(*arguments, **keywords), self._export)
            changed = [
                (index, data)
                for index, item in enumerate(arguments)
                if type(item) in (list, dict, set, bytearray)
                and (data := plain.encode(item, self._export)) != message["with"][index]
            ]
            if changed:
                answer["changed"] = changed
        except BaseException as error:
            answer = {"raised": self._describe(error)}
        self._send(answer)

    def _describe(self, error: BaseException) -> dict[str, Any]:
        bases = [base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins"]
        try:
            arguments = plain.encode(list(error.args))
        except ValueError:
            arguments = [str(error)]
        return {"class": type(error).__name__, "bases": bases, "arguments": arguments}

    def _as_error(self, data: Mapping[str, Any]) -> Exception:
        kind = self.error_class(str(data["class"]), [str(base) for base in data["bases"]])
        arguments = plain.decode(data["arguments"])
        error = kind.__new__(kind)
        error.args = tuple(arguments) if isinstance(arguments, list) else ()
        return error

    def error_class(self, name: str, bases: list[str]) -> type[Exception]:
        """A class of this side for an exception class of the other; always the same for the same class.

        What does not derive from Exception (`SystemExit`, say) becomes a RuntimeError: it may not end the tests.
        """
        known = (getattr(builtins, base, None) for base in bases)
        base = next((one for one in known if isinstance(one, type) and issubclass(one, Exception)), RuntimeError)
        key = (name, base.__name__)
        if key not in self._errors:
            self._errors[key] = type(name, (FromProgram, base), {"__module__": base.__module__})
        return self._errors[key]

    # --- objects ---

    def _export(self, value: Any) -> Any:
        """What is written for a value that is not plain; None where it can be written as plain data."""
        if isinstance(value, Remote):
            return {"yours": number_of(value)}
        kind = type(value)
        if kind.__module__ != self._home and (
            isinstance(value, plain.ENCODABLE) or kind.__module__ in ("numpy", "collections")
        ):
            return None
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)  # Kept for ever, so that its id stays its own.
        if isinstance(value, type) and issubclass(value, BaseException):
            bases = [base.__name__ for base in value.__mro__ if base.__module__ == "builtins"]
            return {"error": bases, "class": value.__name__}
        return {"number": self._numbers[id(value)], "class": kind.__name__}

    def _import(self, data: Any) -> Any:
        if "yours" in data:
            return self._objects[data["yours"]]
        if "error" in data:
            return self.error_class(str(data["class"]), [str(base) for base in data["error"]])
        number = int(data["number"])
        if number not in self._remotes:
            self._remotes[number] = Remote(self, number, str(data["class"]))
        return self._remotes[number]

    # --- the channel ---

    def _send(self, message: Mapping[str, Any]) -> None:
        data = json.dumps(message, separators=(",", ":")).encode()
        if len(data) > LONGEST_MESSAGE:
            data = json.dumps({"raised": self._describe(ValueError("too much data at once"))}).encode()
        view = memoryview(len(data).to_bytes(4, "big") + data)
        try:
            while view:
                view = view[os.write(self._channel, view) :]
        except OSError:
            self._gone("the program ended while it was being tested")

    def _receive(self) -> Any:
        """One message; None at the end of the channel."""
        head = self._read(4)
        if head is None:
            return None
        length = int.from_bytes(head, "big")
        data = self._read(length) if length <= LONGEST_MESSAGE else None
        if data is None:
            self._gone("the program ended while it was being tested")
        try:
            message = json.loads(data)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            self._gone("the other side wrote something that is no message")
        return message

    def _read(self, length: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < length:
            try:
                part = os.read(self._channel, min(length - len(parts), 1 << 20))
            except OSError:
                return None
            if not part:
                return None
            parts += part
        return bytes(parts)

    @staticmethod
    def _gone(why: str) -> NoReturn:
        """End this process at once: an exception could be caught by a test that expects one."""
        os.write(2, f"{why}\n".encode())
        os._exit(1)


class FromProgram(Exception):
    """Beside its own class, what every exception is that came from the other side."""


_FORWARDED = frozenset({"__name__", "__doc__", "__qualname__", "__len__", "__enter__", "__exit__"})


class Remote:
    """An object of the other side.

    The program could make an object that is equal to everything. So it has no say in what compares its objects with
    plain data: such an object equals no plain value, and an order with one is a TypeError. Operators between two of its
    objects are its own. Arithmetic with plain data must give another object of its own, which cannot be turned into a
    number any more: `abs(answer - 0.5) < 1e-6` would otherwise be its to decide. An object of a
    class that the tests do not name stands for a value; it has no `startswith` with which to answer for itself.
    """

    __slots__ = ("__class_name", "__number", "__peer", "__touched")

    def __init__(self, peer: Peer, number: int, class_name: str) -> None:
        for name, value in (("peer", peer), ("number", number), ("class_name", class_name), ("touched", False)):
            object.__setattr__(self, f"_Remote__{name}", value)

    def __ask(self, operation: str, *arguments: Any, **keywords: Any) -> Any:
        return self.__peer.ask(operation, self, *arguments, **keywords)

    def __number_of(self, operation: str, *arguments: Any) -> Any:
        if self.__touched:
            raise TypeError("what became of the program's object and a number is not used as a number")
        return self.__ask(operation, *arguments)

    def __arithmetic(self, operation: str, other: Any, reflected: bool) -> Any:
        first, second = (other, self) if reflected else (self, other)
        result = self.__peer.ask(operation, first, second)
        if isinstance(other, Remote):
            return result
        if not isinstance(result, Remote):
            return NotImplemented
        object.__setattr__(result, "_Remote__touched", True)
        return result

    def __compare(self, operation: str, other: Any) -> Any:
        if self is other:
            return operation in ("eq", "le", "ge")
        if isinstance(other, Remote):
            return self.__ask(operation, other)
        return NotImplemented

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in _FORWARDED:
            raise AttributeError(name)
        if name in PREDICATES and self.__class_name not in self.__peer.named:
            raise AttributeError(f"an object of the program has no {name!r} here")
        return self.__ask("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__ask("set", name, value)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.__ask("call", *arguments, **keywords)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and bool(value.__ask("is a", self))

    def __hash__(self) -> int:
        return int(self.__ask("hash"))

    def __bool__(self) -> bool:
        return bool(self.__number_of("bool"))

    def __int__(self) -> Any:
        return self.__number_of("int")

    def __float__(self) -> Any:
        return self.__number_of("float")

    def __abs__(self) -> Any:
        return self.__number_of("abs")

    def __round__(self, digits: int | None = None) -> Any:
        return self.__number_of("round", digits)

    def __str__(self) -> str:
        return str(self.__ask("str"))

    def __repr__(self) -> str:
        return str(self.__ask("repr"))

    def __len__(self) -> int:
        return int(self.__ask("len"))

    def __iter__(self) -> Any:
        return self.__ask("iter")

    def __next__(self) -> Any:
        return self.__ask("next")

    def __contains__(self, value: Any) -> bool:
        if isinstance(value, Remote):
            return bool(self.__ask("contains", value))
        return any(item is value or item == value for item in self)

    def __getitem__(self, key: Any) -> Any:
        return self.__ask("item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__ask("put", key, value)

    def __delitem__(self, key: Any) -> None:
        self.__ask("drop", key)

    def __enter__(self) -> Any:
        return self.__ask("enter")

    def __exit__(self, *exception: Any) -> None:
        self.__ask("exit")

    def __neg__(self) -> Any:
        return self.__number_of("neg")


def number_of(remote: Remote) -> int:
    """The number under which the other side keeps the object."""
    return int(object.__getattribute__(remote, "_Remote__number"))


def _add_operators() -> None:
    for name in ARITHMETIC:
        for reflected in (False, True):

            def arithmetic(self: Any, other: Any, name: str = name, reflected: bool = reflected) -> Any:
                return self._Remote__arithmetic(name, other, reflected)

            setattr(Remote, f"__{'r' if reflected else ''}{name}__", arithmetic)
    for name in COMPARISONS:

        def compare(self: Any, other: Any, name: str = name) -> Any:
            return self._Remote__compare(name, other)

        setattr(Remote, f"__{name}__", compare)


_add_operators()
