// Numbers, times and names as people read them.

const SHARES = new Set(["accuracy", "correct", "token_accuracy", "agreement", "coverage"]);

/** A number that may be missing; "–" then. The server writes infinite ones as text. */
export function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "–" : value > 0 ? "inf" : "-inf";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(Math.max(0, digits - 2));
  if (Number.isInteger(value)) return String(value);
  return String(Number(value.toPrecision(digits)));
}

/** A metric in its unit. */
export function metric(name, value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return number(value);
  const last = name.split("/").pop();
  if (SHARES.has(last) || /(share|fraction)$/.test(last)) return `${(100 * value).toFixed(1)} %`;
  if (last.endsWith("_percent")) return `${value.toFixed(1)} %`;
  if (last.endsWith("_watts")) return `${value.toFixed(0)} W`;
  if (last.endsWith("_celsius")) return `${value.toFixed(0)} °C`;
  if (last.endsWith("_gib")) return `${value.toFixed(2)} GiB`;
  if (name.startsWith("time/")) return seconds(value);
  return number(value);
}

/** Seconds, in the unit that suits them. */
export function seconds(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  if (value >= 120) return duration(value);
  if (value >= 1) return `${value.toFixed(2)} s`;
  return value >= 1e-3 ? `${(1e3 * value).toFixed(1)} ms` : `${(1e6 * value).toFixed(0)} µs`;
}

/** A long time: 1:02:03, 2d 03:04. */
export function duration(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  const whole = Math.max(0, Math.round(value));
  const two = (part) => String(part).padStart(2, "0");
  const hours = Math.floor(whole / 3600);
  const minutes = Math.floor((whole % 3600) / 60);
  if (hours >= 48) return `${Math.floor(hours / 24)}d ${two(hours % 24)}:${two(minutes)}`;
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

/** A date of a manifest, in local time. */
export function when(text) {
  const date = new Date(text);
  if (Number.isNaN(date.getTime())) return String(text ?? "");
  const two = (part) => String(part).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}`;
}

/** Compare for sorting; missing values come last either way. */
export function compare(a, b, falling) {
  const missing = (value) => value === null || value === undefined || value === "";
  if (missing(a) || missing(b)) return missing(a) - missing(b);
  const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
  return falling ? -order : order;
}
