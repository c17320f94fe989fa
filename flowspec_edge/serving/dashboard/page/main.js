// The page: who is told of what the feed says.

import { fillBoards, showBoards } from "./boards.js";
import { asking, openChat } from "./chat.js";
import { watch } from "./feed.js";
import { expectEnergy, explainFigures, showFigures } from "./figures.js";
import { clearRail, layRail, moveSegments } from "./rail.js";
import { showRequests } from "./requests.js";
import { learnTitles, title } from "./settings.js";
import { clearTree, expectTree, explainTree, growTree } from "./tree.js";

const served = document.querySelector("#served");
const state = document.querySelector("#state");

function describe(cluster) {
  const { model, strategy, stages, dtype, profile } = cluster;
  learnTitles(cluster);
  expectTree(cluster);
  const pace = profile ? `, emulated at the pace of ${profile}` : "";
  served.textContent = `${model} in ${dtype} over ${stages} boards and a draft device, ${title(strategy)}${pace}`;
  document.querySelector("#last").textContent = `V${stages}`;
  tell(cluster.state, cluster.state === "up" ? "up" : cluster.reason);
  showBoards(cluster);
  layRail(cluster);
  explainFigures(cluster);
  openChat(cluster);
}

function tell(name, words) {
  document.body.dataset.state = state.dataset.state = name;
  state.textContent = words;
}

watch({
  cluster: describe,
  boards(event) {
    fillBoards(event);
    expectEnergy(event);
  },
  flow: moveSegments,
  tree: growTree,
  figures(event) {
    showFigures(event);
    showRequests(event);
    explainTree(event, asking());
  },
  cut(why) {
    tell("cut", `${why}; trying again`);
    clearRail();
    clearTree();
  },
});
