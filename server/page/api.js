// Api: requests to this server, with the key where there is one, and what their errors mean.

import { Interrupted } from "./stream.js";

const KEY = "specdec.api-key";

export class ApiError extends Error {
  constructor(status, { message, code, param } = {}, retryAfter = null) {
    super(message || `the server answered with status ${status}`);
    this.status = status;
    this.code = code ?? null;
    this.param = param ?? null;
    this.retryAfter = retryAfter;
  }
}

// The key lives as long as the tab: sessionStorage, never localStorage.
export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set(value) {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  },
};

// A response with a good status; GET, or POST when there is a body. Throws ApiError.
export async function request(path, { body, signal } = {}) {
  const headers = {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (apiKey.get()) headers.Authorization = `Bearer ${apiKey.get()}`;
  const response = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    cache: "no-store",
    signal,
  });
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  throw new ApiError(response.status, answer.error, response.headers.get("Retry-After"));
}

export async function getJson(path, options) {
  return (await request(path, options)).json();
}

// What happened and what to do, in two short sentences, for people.
export function advice(error) {
  if (error instanceof Interrupted) {
    return { title: "The connection was lost", hint: "The answer is incomplete. Regenerate it." };
  }
  if (!(error instanceof ApiError)) {
    return error instanceof TypeError
      ? { title: "The server does not answer", hint: "See whether it is running, then try again." }
      : { title: "The page failed", hint: error.message };
  }
  const wait = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : " Try again soon.";
  if (error.status === 401 || error.status === 403) {
    const hint = apiKey.get()
      ? "The key was not accepted. Enter another."
      : "This server answers only with an API key. Whoever runs it can give you one.";
    return { title: "An API key is needed", hint };
  }
  if (error.code === "context_length_exceeded") {
    const hint = `${error.message}. Start a new chat, shorten the message or lower max tokens.`;
    return { title: "The conversation is too long", hint };
  }
  if (error.status === 429) return { title: "Too many requests", hint: error.message + "." + wait };
  if (error.status === 503) return { title: "Not right now", hint: error.message + "." + wait };
  if (error.status >= 500) return { title: "The server failed", hint: error.message };
  const where = error.param ? ` (field: ${error.param})` : "";
  return { title: "The server refused the request", hint: error.message + where };
}
