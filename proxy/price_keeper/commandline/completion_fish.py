"""Completion for fish: one line for each command and option, on the condition that the words before it fit. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from price_keeper.commandline.completion import FILES, CommandCompletion, OptionCompletion, ValueCompletion

_FISH_SCRIPT = r"""# fish completion for price-keeper; make it anew with: price-keeper completion fish

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


def render_fish(commands: Iterable[CommandCompletion]) -> str:
    command_list = list(commands)
    options_with_value = sorted(
        {name for each in command_list for option in each.options if option.value for name in option.names}
    )
    paths = [_quote_fish(" ".join(each.path)) for each in command_list if each.path]
    lines = [f"complete -c price-keeper {line}" for each in command_list for line in _list_fish_lines(each)]
    return (
        _FISH_SCRIPT.replace("@VALUED@", " ".join(options_with_value))
        .replace("@PATHS@", " ".join(paths))
        .replace("@LINES@", "\n".join(lines))
    )


def _list_fish_lines(command: CommandCompletion) -> Iterator[str]:
    path = "".join(f" {word}" for word in command.path)
    for name, summary in command.subcommands:
        yield f"-n '__price_keeper_at --place=0{path}' -a {name} -d {_quote_fish(summary)}"
    for option in command.options:
        yield f"-n '__price_keeper_at{path}' {_format_fish_option(option)} -d {_quote_fish(option.text)}"
    for position, value in enumerate(command.arguments):
        if value.words or value.path_kind:
            yield f"-n '__price_keeper_at --place={position}{path}' {_format_fish_value(value)}"


def _format_fish_option(option: OptionCompletion) -> str:
    names = [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names]
    if option.value is None:
        return " ".join(names)
    requirement = "-r" if option.value.path_kind == FILES else "-x"  # no files where something else is meant
    return " ".join([*names, requirement, _format_fish_value(option.value)])


def _format_fish_value(value: ValueCompletion) -> str:
    if value.path_kind:
        return "-F" if value.path_kind == FILES else "-a '(__fish_complete_directories (commandline -ct))'"
    return f"-a {_quote_fish(' '.join(value.words))}"


def _quote_fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
