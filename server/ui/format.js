// Numbers as text. "–" stands for what is not known; figures of one kind have the same number of digits, so that a
// column of them lines up and a live one does not jump about.

export const UNKNOWN = "–";

function scaled(value, base, units, digits) {
  let step = 0;
  let rest = Math.abs(value);
  while (rest >= base && step < units.length - 1) {
    rest /= base;
    step += 1;
  }
  const shown = step === 0 && Number.isInteger(value) ? 0 : digits(rest);
  return { value: (value < 0 ? "−" : "") + rest.toFixed(shown), unit: units[step] };
}

/** Texts of an axis' levels, evenly spaced from 0: of one unit, with no more digits than tell them apart. */
export function axis(levels, parts) {
  const highest = parts(levels.at(-1));
  const scale = levels.at(-1) / Number(highest.value.replace("−", "-"));
  const digits = [0, 1, 2, 3].find((n) => levels.every((level) => Math.abs(Number((level / scale).toFixed(n)) - level / scale) < 0.02 * (levels[1] / scale))) ?? 3;
  return levels.map((level) => `${(level / scale).toFixed(level ? digits : 0)} ${highest.unit}`);
}

const threeDigits = (value) => (value >= 100 ? 0 : value >= 10 ? 1 : 2);

/** {value, unit} of a size, in 1024s. */
export function sizeParts(bytes) {
  return scaled(bytes, 1024, ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"], (rest) => (rest >= 100 ? 0 : 1));
}

/** {value, unit} of a rate of bytes, in 1000s. */
export function rateParts(bytesPerSecond) {
  if (bytesPerSecond === 0) return { value: "0", unit: "MB/s" };
  return scaled(bytesPerSecond, 1000, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"], threeDigits);
}

/** {value, unit} of a duration. */
export function secondsParts(seconds) {
  const size = Math.abs(seconds);
  if (size === 0) return { value: "0", unit: "s" };
  if (size < 1e-3) return { value: (seconds * 1e6).toFixed(threeDigits(size * 1e6)), unit: "µs" };
  if (size < 1) return { value: (seconds * 1e3).toFixed(threeDigits(size * 1e3)), unit: "ms" };
  if (size < 120) return { value: seconds.toFixed(threeDigits(size)), unit: "s" };
  if (size < 7200) return { value: (seconds / 60).toFixed(1), unit: "min" };
  if (size < 172800) return { value: (seconds / 3600).toFixed(1), unit: "h" };
  return { value: (seconds / 86400).toFixed(1), unit: "days" };
}

const joined = (parts) => `${parts.value} ${parts.unit}`;
const orUnknown = (format) => (value) => (value === null || value === undefined ? UNKNOWN : format(value));

export const size = orUnknown((bytes) => joined(sizeParts(bytes)));
export const rate = orUnknown((bytes) => joined(rateParts(bytes)));
export const seconds = orUnknown((value) => joined(secondsParts(value)));
export const percentParts = (ratio) => ({ value: (ratio * 100).toFixed(1), unit: "%" });
export const percent = orUnknown((ratio) => joined(percentParts(ratio)));
export const count = orUnknown((value) => Math.round(value).toLocaleString("en-US"));
export const factor = orUnknown((value) => value.toFixed(value >= 100 ? 0 : value >= 10 ? 1 : 2));

export function ago(seconds) {
  if (seconds === null || seconds === undefined) return "never";
  if (seconds < 1) return "now";
  if (seconds < 120) return `${Math.round(seconds)} s ago`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86400)} days ago`;
}

export function clock(atSeconds, withSeconds) {
  const options = { hour: "2-digit", minute: "2-digit", hour12: false };
  if (withSeconds) options.second = "2-digit";
  return new Date(atSeconds * 1000).toLocaleTimeString("en-GB", options);
}
