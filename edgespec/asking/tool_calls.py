"""Tool calls: the forms in which models write them, and grammars of calls that an answer has to make.

The tools go into the prompt through the model's own chat template. What the template tells the model to
write, and shows of earlier calls, says which of :data:`FORMS` its answers have; that begins calls with a tag,
or with the answer. :mod:`edgespec.answering.call_reading` reads them.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from edgespec.asking.call_values import (
    QUOTE,
    allowed_values,
    keywords_of,
    kinds_of,
    listed,
    plain,
    properties_of,
    required_of,
    summary,
    table,
)
from edgespec.decoding.grammar import Compilable, Grammar
from edgespec.decoding.schemas import PreparedSchema, Unheld, check_length, escaped
from edgespec_models.errors import RequestError
from edgespec_models.schema import shown
from edgespec_models.text.tokenizer import Tokenizer

Function = Mapping[str, Any]
_MARK: Final = re.compile(r"(</?\|?[\w\"]+\|?>|\[[A-Z_]+\])")


def format_of(source: str) -> "Form | None":
    """The form in which the model of the chat template ``source`` writes calls; None if it is not known."""
    return next((form for form in FORMS if re.search(form.shows, source)), None)


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise RequestError if ``tools`` are not functions as in OpenAI's chat API."""
    for at, tool in enumerate(tools):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if tool.get("type", "function") != "function" or not isinstance(name, str) or not name:
            raise RequestError(
                f"is {shown(tool)}; allowed: {{'type': 'function', 'function': {{'name': a text, "
                "'description': a text, 'parameters': a JSON schema}}",
                f"tools[{at}]",
            )


def must_call(
    tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any]
) -> Sequence[Mapping[str, Any]]:
    """The tools that fit ``choice`` if it requires a call; both have the form of OpenAI's chat API."""
    if choice in ("auto", "none"):
        return ()
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    chosen = [tool for tool in tools if choice == "required" or tool["function"]["name"] == name]
    if not chosen:
        names = ", ".join(tool["function"]["name"] for tool in tools) or "none here"
        raise RequestError(
            f"is {shown(choice)}; allowed: 'auto', 'none', 'required' with tools, or "
            f"{{'type': 'function', 'function': {{'name': one of the tools, {names}}}}}",
            "tool_choice",
        )
    return chosen


@dataclass(frozen=True, slots=True)
class Calls(Compilable):
    """Calls of ``tools`` in the form of a model, whose arguments fit; or an ``answer``, if there is one.

    With ``several`` it is one call or more, if the form has more. Beside an answer a call may be JSON without
    tags, as many models write it, where the form writes nothing before texts. Control tokens are written as
    such. There may be no tools.
    """

    form: "Form"
    tools: Sequence[Mapping[str, Any]]
    tokenizer: Tokenizer
    several: bool = False
    answer: Compilable | None = None

    def grammar(self) -> Grammar:
        """The grammar as text for llguidance."""
        functions = [tool["function"] for tool in self.tools]
        schemas, length = dict[str, PreparedSchema](), 0
        for function in functions:
            schemas[function["name"]] = schema = _prepared(function)
            check_length(length := length + len(json.dumps(schema.grammar)))
            schema.unheld += _unheld(self.form, function)
        before, between, after = (tag and _written(tag, self.tokenizer) for tag in self.form.around)
        more = f"({between} call)*" if self.several and between else ""
        starts, rules = list[str](), [_FREE]
        if functions:
            starts.append(f"{before} call {more} {after}")
            rules.append(f"call: {' | '.join(map(self.form.call, functions))}")
            rules.append(f"args: {_written(self.form.behind_name, self.tokenizer)}")
        rules += _marked_values(self.tokenizer) if self.form.call is _in_marks else []
        answer = Grammar([]) if self.answer is None else self.answer.grammar()
        if answer.parts and self.form.text:
            starts.append(f"{_written(self.form.text, self.tokenizer)} @answer")
        elif answer.parts:
            starts += ["bare", "@answer"]
            bare = "call" if self.form.call is _in_json else " | ".join(map(_in_json, functions))
            rules.append(f"bare: {bare}")
        text = "\n".join([f"start: {' | '.join(starts)}", *rules])
        named = [{**part, "name": "answer"} for part in answer.parts]
        return Grammar([{"lark_grammar": text}, *named], {**answer.schemas, **schemas})


_FREELY: Final = {"whitespace_flexible": True}
_OPEN: Final = {"anyOf", "oneOf", "patternProperties"}  # rules for other arguments than the named ones
_MOST_REQUIRED: Final = 3  # arguments that a grammar in any order requires, of each of a few tools
_FEW: Final = 16
_WS: Final = "WS: /[ \\t\\r\\n]{1,9}/"


@dataclass(frozen=True, slots=True)
class BegunCalls(Compilable):
    """The calls that a mark of ``form`` begins, with the mark, spaced as the model likes.

    With a ``name`` it is a call of this tool without a mark: JSON that has the name before the arguments, or
    a tag with the name.
    """

    form: "Form"
    tools: Sequence[Mapping[str, Any]]
    tokenizer: Tokenizer
    name: str = ""

    def grammar(self) -> Grammar:
        """The grammar as text for llguidance."""
        form, tagged = self.form, self.form.call is _in_xml
        functions = [tool["function"] for tool in self.tools]
        functions = [function for function in functions if self.name in ("", function["name"])]
        rules, calls = [_FREE, _WS, r'KEY: "\"arguments\"" | "\"parameters\""'], list[str]()
        most = _MOST_REQUIRED if len(functions) <= _FEW else 0
        for at, function in enumerate(functions):
            name, arguments = function["name"], f"args{at}"
            rules += _in_any_order(function, arguments, most, tagged=tagged)
            if tagged:
                calls.append(arguments)
            elif form.name == "harmony":
                calls.append(f"WS? {arguments}")
            elif form.call is _in_args and not self.name:
                behind = _written(form.behind_name.strip(), self.tokenizer)
                calls.append(f"{_quoted(name)} WS? {behind} WS? {arguments}")
            else:
                words = ['"\\"name\\""', '":"', _quoted(_quoted(name)), '","', "KEY", '":"', arguments]
                whole = f"WS? {' WS? '.join(words)} WS?"
                calls.append(f'"{{" {whole} "}}" | "{{{{" {whole} "}}}}"')
        first, start = "<" if tagged else "{", "call"
        if not self.name:
            mark, between, after = form.around
            bracket = '"[" WS?' if mark.endswith("[") else ""
            more = '(WS? "," WS? call)*' if between == ", " else ""
            end = f"WS? {_written(after.strip(), self.tokenizer)}" if after else ""
            written = _written(mark.rstrip("[\n"), self.tokenizer)
            first, start = mark[0], f"{written} WS? {bracket} call {more} {end}"
        before = "" if form.name == "harmony" else "BEFORE? "
        rules += [f"BEFORE: /[^{re.escape(first)}]+/", f"start: {before}{start}"]
        return Grammar([{"lark_grammar": "\n".join([*rules, f"call: {' | '.join(calls)}"])}])


def _in_any_order(function: Function, rule: str, most: int, *, tagged: bool) -> list[str]:
    """Rules of a call's arguments in the order that the model likes, between tags or in JSON.

    A grammar of a schema has one order, and a model that wants another would have to leave members out. So
    there is a rule for what may follow each set of the first ``most`` required ones, each of which must be
    there once. A schema with rules for other arguments than the named ones has its own grammar.
    """
    parameters = table(function.get("parameters"))
    if tagged:
        members, value = _xml_members(function), "FREE"
        begin, comma, end = _quoted(f"<function={function['name']}>\n"), "", _quoted("</function>")
    elif parameters.keys() & _OPEN:
        spaced = {**function, "parameters": {"x-guidance": _FREELY, **parameters}}
        return [f"{rule}: {_json(_prepared(spaced).grammar)}"]
    else:
        held, value = _held_by(function), f'WS? ":" WS? {_json({"x-guidance": _FREELY})} WS?'
        begin, comma, end = '"{" WS?', '"," WS?', '"}"'
        members = {
            key: f'{_quoted(_quoted(key))} WS? ":" WS? {held({"x-guidance": _FREELY, **schema})} WS?'
            for key, schema in properties_of(parameters).items()
        }
    must, rules = [key for key in members if key in required_of(parameters)][:most], list[str]()
    if parameters and parameters.get("additionalProperties") is not False:
        known = "|".join(map(re.escape, members))
        key = (r"<parameter=", r"[^>\n]+", r">\n") if tagged else ('"', r'[^"\\]*', '"')
        rules.append(f"{rule.upper()}: /{key[0]}{key[1]}{key[2]}/ & ~/{key[0]}({known}){key[2]}/")
        members[""] = f"{rule.upper()} {value}"
    names = {key: f"{rule}m{at}" for at, key in enumerate(members)}
    rules += [f"{names[key]}: {text}" for key, text in members.items()]
    for present in range(2 ** len(must)):
        following = [f"{names[key]} {rule}s{present}" for key in members if key not in must]
        following += [
            f"{names[key]} {rule}s{present | 1 << at}" for at, key in enumerate(must) if not present >> at & 1
        ]
        ends = [end] if present == 2 ** len(must) - 1 else []
        rules.append(f"{rule}s{present}: {' | '.join([*(f'{comma} {more}' for more in following), *ends])}")
        if not present:
            rules.append(f"{rule}: {begin} ({' | '.join([*following, *ends])})")
    return rules


def marks_of(form: "Form", names: Sequence[str], tokenizer: Tokenizer) -> re.Pattern[bytes]:
    """What begins calls that a grammar can hold; see :class:`~edgespec.running.begun.BegunParts`.

    A mark that is no token of its own may be a mention of it, so there a bracket or tag has to follow.
    """
    name = f"(?P<name>{'|'.join(map(re.escape, names))})"
    if form.name == "harmony":
        marks = rf"(?P<head>to=(?:functions\.)?{name}\b[^{{]*<\|message\|>)"
    elif form.call is _in_xml:
        marks = f"<function={name}>"
    else:
        marks = rf"""\{{{{1,2}}\s*"name"\s*:\s*"{name}"\s*,\s*"(?:arguments|parameters)"\s*:"""
    mark = form.around[0].rstrip("[\n")
    if mark and form.name != "harmony" and form.call not in (_in_python, _in_marks, _in_pairs):
        is_token = tokenizer.special_id(mark) or tokenizer.id_of_bytes(mark.encode())
        follows = "" if is_token else r"\s*[\[{<]"
        marks = f"{re.escape(mark)}{follows}|{marks}"
    return re.compile(marks.encode())


def with_calls_as_text(source: str, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Messages whose calls are written into their contents, for a chat template that does not show any."""
    form = format_of(source)
    return messages if form is None else [_with_calls_as_text(form, message) for message in messages]


def _with_calls_as_text(form: "Form", message: Mapping[str, Any]) -> Mapping[str, Any]:
    functions = [table(table(call).get("function")) for call in listed(table(message).get("tool_calls"))]
    if not functions or not all(functions):
        return message  # a malformed one is refused with the others
    before, between, after = form.around
    write = _call_in_python if form.call is _in_python else _call_in_json
    calls = [write(tool) for tool in functions]
    text = f"{message.get('content') or ''}{before}{(between or '; ').join(calls)}{after}"
    return {"role": message.get("role"), "content": text}


def _call_in_json(function: Function) -> str:
    return f'{{"name": {json.dumps(function.get("name"))}, "arguments": {_arguments(function)}}}'


def _call_in_python(function: Function) -> str:
    try:
        arguments = table(json.loads(_arguments(function)))
    except ValueError:  # a text that is no JSON
        arguments = {}
    return f"{function.get('name')}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _arguments(function: Function) -> str:
    arguments = function.get("arguments", {})
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _written(text: str, tokenizer: Tokenizer) -> str:
    """A text in a grammar, control tokens as such."""
    ids = [(part, tokenizer.special_id(part)) for part in _MARK.split(text) if part]
    return " ".join(_quoted(part) if control is None else f"<[{control}]>" for part, control in ids)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _prepared(function: Function, root: str = "#") -> PreparedSchema:
    """The schema of a function's arguments, which are an object; RequestError if it is no JSON."""
    parameters = table(function.get("parameters")) or {"additionalProperties": False}
    if "$ref" not in parameters:
        parameters = {"type": "object", **parameters}
    try:
        whole = PreparedSchema(parameters, strict=function.get("strict") is True)
        return whole if root == "#" else PreparedSchema(parameters, root=root, is_alone=whole.is_alone)
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(
            f"has {function['name']!r:.80}, whose parameters are no JSON ({error}); give a JSON schema",
            "tools",
        ) from error


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps(schema)}"


def _in_json(function: Function, key: str = "arguments") -> str:
    schemas = {"name": {"const": function["name"]}, key: _prepared(function, f"#/properties/{key}").grammar}
    options = schemas[key].pop("x-guidance")  # because these have to stand outermost
    whole = {"type": "object", "properties": schemas, "required": [*schemas], "additionalProperties": False}
    return _json({"x-guidance": options, **whole})


def _in_args(function: Function) -> str:
    return f"{_quoted(function['name'])} args {_json(_prepared(function).grammar)}"


def _in_xml(function: Function) -> str:
    return _in_turn(function, _xml_members(function), f"<function={function['name']}>\n", "", "</function>")


def _in_pairs(function: Function) -> str:
    """The name, and tags around the name and the value of each argument."""
    tags = "<arg_key>{}</arg_key><arg_value>", "</arg_value>", "PAIRED"
    return _in_turn(function, _xml_members(function, *tags), function["name"], "", "")


def _xml_members(
    function: Function, begin: str = "<parameter={}>\n", end: str = "\n</parameter>\n", free: str = "FREE"
) -> dict[str, str]:
    """Rules of the arguments between tags, by their names; ``free`` is that of texts."""
    parameters, members = table(function.get("parameters")), dict[str, str]()
    end, held = _quoted(end), _held_by(function)
    for key, schema in properties_of(parameters).items():
        own = summary(parameters, schema)
        if values := allowed_values(own):
            value = f"({' | '.join(_quoted(plain(value)) for value in values)}) {end}"
        elif _is_free(own):
            value = free
        else:
            value = f"{held(schema)} {end}"
        members[key] = f"{_quoted(begin.format(key))} {value}"
    return members


def _in_python(function: Function) -> str:
    """The arguments by their names; values are JSON, which these models read and write too."""
    held, properties = _held_by(function), properties_of(table(function.get("parameters")))
    members = {key: f"{_quoted(key + '=')} {held(schema)}" for key, schema in properties.items()}
    return _in_turn(function, members, f"{function['name']}(", ", ", ")")


def _in_marks(function: Function) -> str:
    """The arguments by their names, in the order of these, as Gemma 4's template shows them."""
    parameters, held, written = table(function.get("parameters")), _held_by(function), dict[str, str]()
    for key, schema in sorted(properties_of(parameters).items(), key=lambda item: item[0].lower()):
        own = summary(parameters, schema)
        values = [_marked(value) for value in allowed_values(own)] or sorted(kinds_of(own)) or ["value"]
        rule = held(schema) if _is_plain(own) else " | ".join("text" if v == "string" else v for v in values)
        written[key] = f"{_quoted(key + ':')} ({rule})"
    return _in_turn(function, written, f"call:{function['name']}{{", ",", "}")


def _is_plain(summed: Mapping[str, Any]) -> bool:
    """Whether all allowed values are written as in JSON."""
    return kinds_of(summed) <= _PLAIN and bool(kinds_of(summed)) and not allowed_values(summed)


def _marked(value: object) -> str:
    return f"quote {_quoted(value)} quote" if isinstance(value, str) else _quoted(json.dumps(value))


def _marked_values(tokenizer: Tokenizer) -> list[str]:
    """Rules of values with marks around texts, which may be a control token, or no token at all."""
    is_control, mark = tokenizer.special_id(QUOTE) is not None, re.escape(QUOTE)
    free = "/(?s:.*)/"
    text = f"quote {'TEXT quote' if is_control else 'TEXT'}"
    end = "" if is_control else f" {_quoted(QUOTE)}"
    return [
        f"quote: {_written(QUOTE, tokenizer)}",
        f"TEXT: {free if is_control else f'({free} & ~/(?s:.*{mark}.*)/)'}{end}",
        f"text: {text}",
        f"number: {_json({'type': 'number'})}",
        f"integer: {_json({'type': 'integer'})}",
        f"boolean: {_json({'type': 'boolean'})}",
        f"null: {_json({'type': 'null'})}",
        'array: "[" (value ("," value)*)? "]"',
        'object: "{" (member ("," member)*)? "}"',
        'member: /[A-Za-z_][A-Za-z0-9_.-]*/ ":" value',
        "value: text | number | boolean | null | array | object",
    ]


def _in_turn(function: Function, members: Mapping[str, str], begin: str, comma: str, end: str) -> str:
    """A call with its arguments in the order of ``members``; only the required ones must be present."""
    keys, required = [*members], required_of(table(function.get("parameters")))
    between = f"{_quoted(comma)} " if comma else ""

    def behind(at: int) -> str:
        return "".join(
            f" {between}{members[key]}" if key in required else f" ({between}{members[key]})?"
            for key in keys[at + 1 :]
        )

    must = next((at for at, key in enumerate(keys) if key in required), None)
    if must is not None:
        before = "".join(f"({members[key]} {between})? " for key in keys[:must])
        arguments = before + members[keys[must]] + behind(must)
    else:  # any of them may be the first
        starts = " | ".join(members[key] + behind(at) for at, key in enumerate(keys))
        arguments = f"({starts})?" if starts else ""
    check_length(len(arguments))
    return f"{_quoted(begin)} {arguments} {_quoted(end)}"


def _held_by(function: Function) -> Callable[[Mapping[str, Any]], str]:
    """The function that makes a rule of an argument's schema, which may refer to the whole schema."""
    root = "#/$defs/parameters"
    whole = _prepared(function, root)
    del whole.grammar["x-guidance"]

    def held(schema: Mapping[str, Any]) -> str:
        own = PreparedSchema(schema, root=root, is_alone=whole.is_alone).grammar
        if '"$ref": ' in json.dumps(own):
            own["$defs"] = {"parameters": whole.grammar}
        return _json(own)

    return held


def _is_free(summed: Mapping[str, Any]) -> bool:
    """Whether an argument may be a text; between tags any text is allowed. See :func:`summary`."""
    return not allowed_values(summed) and "string" in (kinds_of(summed) or {"string"})


def _unheld(form: "Form", function: Function) -> list[Unheld]:
    """The parts of a schema that rules of single arguments ignore.

    These are rules for all arguments, bounds of texts between tags, and between marks all but types and
    listed values.
    """
    if form.call not in (_in_xml, _in_pairs, _in_python, _in_marks):
        return []
    parameters = table(function.get("parameters"))
    unheld = [Unheld("#", key, parameters[key]) for key in _OF_ALL if key in parameters]
    for name, schema in properties_of(parameters).items():
        own, ignored = summary(parameters, schema), dict[str, Any]()
        if form.call in (_in_xml, _in_pairs) and _is_free(own):
            ignored = keywords_of(parameters, schema, _OF_TEXTS)
        elif form.call is _in_marks and not _is_plain(own):
            ignored = {key: value for key, value in schema.items() if key not in _HELD_IN_MARKS}
        unheld += [Unheld(f"#/properties/{escaped(name)}", *part) for part in ignored.items()]
    return unheld


@dataclass(frozen=True, slots=True)
class Form:
    """The form in which a model writes calls.

    Attributes:
        name: of the form.
        shows: what a chat template for such a model holds, as a regular expression.
        tags: any of them begins calls.
        around: what is written before the first call, between two, and behind the last; between is None
            where the model writes one call only.
        call: makes a grammar's rule of a call of a function.
        behind_name: what stands between the name of a function and its arguments, where it is written so.
        text: what is written before an answer's text.
        raw: whether texts in single quotes have no escapes.
    """

    name: str
    shows: str
    tags: tuple[str, ...]
    around: tuple[str, str | None, str]
    call: Callable[[Function], str] = _in_json
    behind_name: str = "[ARGS]"
    text: str = ""
    raw: bool = False

    @property
    def close(self) -> str:
        """The tag behind calls, if any; it may be missing."""
        return self.around[2].strip("\n]")


_PLAIN: Final = frozenset(("integer", "number", "boolean", "null"))
_HELD_IN_MARKS: Final = ("type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf", "description", "title")
_OF_ALL: Final = ("anyOf", "oneOf", "minProperties", "maxProperties")
_OF_TEXTS: Final = ("minLength", "maxLength", "pattern", "format")
_FREE: Final = """FREE: (/(?s:.*)/ & ~/(?s:.*<\\/parameter>.*)/) "\\n</parameter>\\n"
PAIRED: (/(?s:.*)/ & ~/(?s:.*<\\/arg_value>.*)/) "</arg_value>\""""
"""Texts between tags, up to the closing one."""
_TAGGED: Final = ("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
_SHOWS_TAGGED: Final = r'<tool_call>[^<]{0,200}\\?"name\\?":'
_SHOWS_BARE: Final = r'\{"name": [^}{"]*, ?"parameters": |\[\w+\(\w+=\w'  # JSON, or a list of Python's
_MISTRAL: Final = ("[TOOL_CALLS]",)
_LISTS: Final = "<|tool_call|>", "functools"

_PYTHON: Final = ("<|tool_call_start|>[", ", ", "]<|tool_call_end|>")

_GEMMA: Final = ("<|tool_call>", "<tool_call|><|tool_call>", "<tool_call|>")

FORMS: Final = (
    Form(  # of whose messages edgespec.answering.channel_reading makes texts with this tag
        "harmony",
        r"<\|channel\|>",
        ("to=functions.",),
        ("commentary to=functions.", None, ""),
        _in_args,
        " <|constrain|>json<|message|>",
        "final<|message|>",
    ),
    Form("gemma4", r"<\|tool_call>", ("<|tool_call>",), _GEMMA, _in_marks),
    Form(
        "lfm2.5",
        r"""\+ *"'"(?s:.)*<\|tool_call_start\|>""",
        ("<|tool_call_start|>",),
        _PYTHON,
        _in_python,
        raw=True,
    ),
    Form("lfm2", r"<\|tool_call_start\|>|List of tools: ", ("<|tool_call_start|>",), _PYTHON, _in_python),
    Form("args", r"\[TOOL_CALLS\](?s:.)*\[ARGS\]", _MISTRAL, (*_MISTRAL, *_MISTRAL, ""), _in_args),
    Form("mistral", r"\[TOOL_CALLS\]", _MISTRAL, ("[TOOL_CALLS][", ", ", "]")),
    Form(
        "glm",
        "<arg_key>",
        ("<tool_call>",),
        ("<tool_call>", "</tool_call><tool_call>", "</tool_call>"),
        _in_pairs,
    ),
    Form("xml", r"<tool_call>(?:\\n|\s)*<function=", ("<tool_call>", "<function="), _TAGGED, _in_xml),
    Form("smollm3", rf"python_tools(?s:.)*{_SHOWS_TAGGED}", ("<tool_call>", "<code>"), _TAGGED),
    Form("hermes", _SHOWS_TAGGED, ("<tool_call>",), _TAGGED),
    Form("phi", r"<\|/tool(?:_call)?\|>", _LISTS, ("<|tool_call|>[", ", ", "]<|/tool_call|>")),
    Form("granite", r"<\|tool_call\|>", _LISTS, ("<|tool_call|>[", ", ", "]")),
    Form("nemotron", "<TOOLCALL>", ("<TOOLCALL>",), ("<TOOLCALL>[", ", ", "]</TOOLCALL>")),
    Form("functools", r"functools\[", _LISTS, ("functools[", ", ", "]")),
    Form("llama3", _SHOWS_BARE, ("<|python_tag|>",), ("", None, ""), partial(_in_json, key="parameters")),
)
"""The known forms. A template's form is the first that it shows."""
