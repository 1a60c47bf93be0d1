// Asks the control port. The header says that it is this page that asks; none from elsewhere can send it.

export const HEADERS = { "X-Price-Keeper-Page": "1" };

export class Refused extends Error {
  constructor(status, told, wait) {
    const details = (told?.details ?? []).map(({ path, message }) => (path ? `${path}: ${message}` : message));
    super([told?.message ?? `the answer was ${status}`, ...details].join("; "));
    this.status = status;
    this.wait = wait;
  }
}

export async function ask(method, path, body, headers = {}) {
  const given = body === undefined ? {} : { "Content-Type": "application/json" };
  const answer = await fetch(path, {
    method,
    headers: { ...HEADERS, Accept: "application/json", ...given, ...headers },
    body: body === undefined ? undefined : JSON.stringify(body),
    cache: "no-store",
  });
  const told = await answer.json().catch(() => null);
  if (!answer.ok) throw new Refused(answer.status, told, Number(answer.headers.get("Retry-After")) || 0);
  return { told, tag: answer.headers.get("ETag") };
}

export const pathOf = ({ org, app }) => `/api/v1/orgs/${org}${app === null ? "" : `/apps/${encodeURIComponent(app)}`}`;
