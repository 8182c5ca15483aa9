// Asking the server. The browser keeps answers with their tags, so one that did not change is not sent again.

/** Why something could not be had: what, where, and how to mend it. */
export class Problem extends Error {
  constructor(told, status) {
    super(told.what);
    this.told = told;
    this.status = status;
  }
}

/** An answer of the API. Throws a Problem; an aborted request throws the signal's own error. */
export async function get(name, values = {}, signal = undefined) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(values)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== undefined && one !== null) query.append(key, String(one));
    }
  }
  let response;
  try {
    response = await fetch(`api/${name}?${query}`, { cache: "no-cache", signal });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Problem({ what: "the viewer does not answer", where: "", mend: "is `strop view` still running?" }, 0);
  }
  let body;
  try {
    body = await response.json();
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Problem({ what: "the answer cannot be read", where: name, mend: "" }, response.status);
  }
  if (!response.ok) {
    throw new Problem(body.problem ?? { what: `the viewer answers ${response.status}`, where: name, mend: "" }, response.status);
  }
  return body;
}
