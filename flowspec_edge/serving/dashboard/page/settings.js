// How to answer: strategy, temperature, length, and whether two strategies race.

const PLAIN = "autoregressive";
let titles = {};  // by name, from the server

const field = (id) => document.querySelector(`#${id}`);
const strategy = field("strategy"), temperature = field("temperature"), length = field("length");
const race = field("race");

/** A strategy's name in words. */
export const title = (name) => (name === PLAIN ? "plain" : titles[name] ?? name);

/** Learn the strategies' titles, from a `cluster` event. */
export function learnTitles(cluster) {
  titles = cluster.titles;
}

/** Offer what the server has, from a `cluster` event; `tokens`: the length at first, null: the server's own. */
export function offerSettings({ strategies, strategy: usual, context }, tokens) {
  strategy.replaceChildren(...strategies.map((name) => new Option(title(name), name, name === usual, name === usual)));
  strategy.disabled = strategies.length < 2;
  length.max = context ?? "";
  length.value = tokens ?? "";
  race.closest("label").hidden = contender(usual) === null;
  nameRace(usual);
  strategy.addEventListener("change", () => nameRace(usual));
}

const nameRace = (usual) => { field("contender").textContent = title(contender(usual)); };

/** The strategy that races against plain decoding: the chosen one, else the usual one, else any; null: none can. */
function contender(usual) {
  const offered = [...strategy.options].map((option) => option.value);
  if (!offered.includes(PLAIN)) return null;
  return [strategy.value, usual, offered.at(-1)].find((name) => name && name !== PLAIN) ?? null;
}

/** The fields of a request. */
export function settings() {
  return {
    ...(strategy.value ? { flowspec: { strategy: strategy.value } } : {}),
    ...(temperature.value === "" ? {} : { temperature: Number(temperature.value) }),
    ...(length.value === "" ? {} : { max_tokens: Number(length.value) }),
  };
}

/** The two strategies that are to race, plain decoding first; null: none are. */
export function racers(usual) {
  return race.checked ? [PLAIN, contender(usual)] : null;
}
