// The order of search results: a public name, then tasks, then pages, then the reference.
const FOLDERS = [["docs/tasks/", 40], ["docs/", 20], ["colabs/", 10]];
var Scorer = {
  score: ([page, , , , score]) =>
    score + (FOLDERS.find(([folder]) => page.startsWith(folder)) ?? ["", 0])[1],
  objNameMatch: 100,
  objPartialMatch: 6,
  objPrio: {0: 15, 1: 5, 2: -5},
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
