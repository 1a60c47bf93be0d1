"""Completion for fish: one line for each command and option, on the condition that the words before it fit. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from price_keeper.commandline.completion import FILES, Command, Option, Value

_SCRIPT = r"""# fish completion for price-keeper; make it anew with: price-keeper completion fish

# Whether the words so far are these commands, and with --place, that so many arguments follow them.
function __price_keeper_at
    argparse 'place=' -- $argv
    set -l path
    set -l place 0
    set -l skips no
    for each in (commandline -opc)[2..-1]
        if test $skips = yes
            set skips no
        else if contains -- $each @VALUED@
            set skips yes
        else if string match -q -- '-*' $each
            continue
        else if contains -- (string join ' ' $path $each) @PATHS@
            set path $path $each
        else
            set place (math $place + 1)
        end
    end
    test "$argv" = "$path"; and begin
        not set -q _flag_place; or test $place = $_flag_place
    end
end

complete -c price-keeper -f
@LINES@
"""


def script(commands: Iterable[Command]) -> str:
    found = list(commands)
    valued = sorted({name for each in found for option in each.options if option.value for name in option.names})
    paths = [_quoted(" ".join(each.path)) for each in found if each.path]
    lines = [f"complete -c price-keeper {line}" for each in found for line in _lines(each)]
    return (
        _SCRIPT.replace("@VALUED@", " ".join(valued))
        .replace("@PATHS@", " ".join(paths))
        .replace("@LINES@", "\n".join(lines))
    )


def _lines(command: Command) -> Iterator[str]:
    path = "".join(f" {word}" for word in command.path)
    for name, summary in command.verbs:
        yield f"-n '__price_keeper_at --place=0{path}' -a {name} -d {_quoted(summary)}"
    for option in command.options:
        yield f"-n '__price_keeper_at{path}' {_flags(option)} -d {_quoted(option.text)}"
    for place, value in enumerate(command.arguments):
        if value.words or value.place:
            yield f"-n '__price_keeper_at --place={place}{path}' {_may_be(value)}"


def _flags(option: Option) -> str:
    names = [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names]
    if option.value is None:
        return " ".join(names)
    only = "-r" if option.value.place == FILES else "-x"  # no files where something else is meant
    return " ".join([*names, only, _may_be(option.value)])


def _may_be(value: Value) -> str:
    if value.place:
        return "-F" if value.place == FILES else "-a '(__fish_complete_directories (commandline -ct))'"
    return f"-a {_quoted(' '.join(value.words))}"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
