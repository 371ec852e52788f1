// Package yamlfile reads a YAML file that a person has written (a scenario, a model profile, a
// plan), and refuses keys and values that the program does not use. It keeps the position of each
// value, so that every error names file and line. It interprets no value and opens no file: its
// input is bytes.
//
//	bytes ── Parse ──► File ── Decode(&v) ──► for an unknown key, wrong type or NaN: file:line: error and remedy
//	                     └──── Errorf("wan.gbps", …) ──► the same, for errors that the caller detects
//
// An unknown key, a duplicate key, a second document and a number that is not finite are errors. A
// file has at most SizeMax bytes, or the size given to ParseAtMost.
//
// There is no lock; a File is immutable after Parse.
package yamlfile
