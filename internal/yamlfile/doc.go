// Package yamlfile reads a YAML file that people write (a scenario, a model
// profile, a plan) strictly, and keeps where each value stood, so that whatever
// is wrong with one is said with file and line. It knows no file's meaning and
// reads none itself: bytes come in.
//
//	bytes ── Parse ──► File ── Decode(&v) ──► unknown key, wrong type, NaN: file:line: what, and what would do
//	                     └──── Errorf("wan.gbps", …) ──► the same, of what only the caller can judge
//
// A key that is not known, or given twice, is an error, as is a second document,
// and a number that is not finite. A file is at most SizeMax bytes long, or
// what its reader says to ParseAtMost.
//
// There is no lock; a File is not changed after Parse.
package yamlfile
