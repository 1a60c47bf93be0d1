// What every client's program does around its calls: rounds come from standard input, one line tells their outcome.
// Rounds run at once, each in a process of its own with the round's environment; telling.py says what a round is.
import { spawn } from "node:child_process";
import { createRequire } from "node:module";
import { dirname } from "node:path";
import { existsSync, readFileSync } from "node:fs";
import { text } from "node:stream/consumers";

const ONE = "--one-round";
const PATIENCE_MS = 20_000; // longer than any client waits between its tries

export async function tell(packageName, opened) {
  const given = JSON.parse(await text(process.stdin));
  if (process.argv.includes(ONE)) {
    console.log(JSON.stringify(await play(given, opened)));
  } else {
    const rounds = await Promise.all(given.map(apart));
    console.log(JSON.stringify({ version: versionOf(packageName), rounds }));
  }
}

async function apart(round) {
  const child = spawn(process.execPath, [process.argv[1], ONE], {
    env: { ...process.env, ...round.environ },
    stdio: ["pipe", "pipe", "inherit"],
    timeout: PATIENCE_MS,
  });
  child.stdin.end(JSON.stringify(round));
  const said = await text(child.stdout);
  // Nothing was said if a client waits for what never comes.
  return said ? JSON.parse(said) : round.calls.map(() => ({ error: described(new Error("it never settled")) }));
}

async function play(round, opened) {
  const outcomes = [];
  let call;
  for (const [operation, args] of round.calls) {
    try {
      call ??= opened(round.settings);
      outcomes.push({ answer: await call(operation, lengthened(args)) });
    } catch (failure) {
      outcomes.push({ error: described(failure) });
    }
  }
  return outcomes;
}

function lengthened(args) {
  const long = /^long (\d+)$/.exec(args.text ?? "");
  return long ? { ...args, text: "x".repeat(Number(long[1])) } : args;
}

export function described(failure) {
  return {
    kind: failure.constructor.name,
    code: failure.$metadata ? failure.name : (failure.headers?.get?.("x-amzn-errortype") ?? null),
    message: String(failure.message),
    status: failure.$metadata?.httpStatusCode ?? failure.status ?? null,
    retries: (failure.$metadata?.attempts ?? 1) - 1,
  };
}

export function told(answered, inputTokens, outputTokens) {
  return { text: answered, input_tokens: inputTokens, output_tokens: outputTokens };
}

function versionOf(packageName) {
  let folder = dirname(createRequire(import.meta.url).resolve(packageName));
  for (;;) {
    const file = `${folder}/package.json`;
    const found = existsSync(file) ? JSON.parse(readFileSync(file, "utf8")) : {};
    if (found.name === packageName) return found.version;
    folder = dirname(folder);
  }
}

