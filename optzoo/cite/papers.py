"""The authors and venues of the papers that docstrings refer to.

A docstring has the first author, the title, the address and the year; this table has the other
fields by address. A work without a venue is cited as ``@misc``.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Paper(NamedTuple):
    """The authors of a paper in BibTeX format, and the fields of its venue."""

    authors: str
    venue: Mapping[str, str] = MappingProxyType({})


def _icml(number: int, volume: str, pages: str) -> dict[str, str]:
    ending = "nd" if number == 32 else "th"
    name = f"Proceedings of the {number}{ending} International Conference on Machine Learning"
    series = "Proceedings of Machine Learning Research"
    return {"booktitle": name, "series": series, "volume": volume, "pages": pages}


def _iclr(name: str) -> dict[str, str]:
    return {"booktitle": f"{name} International Conference on Learning Representations"}


def _journal(name: str, volume: int, number: int | None, pages: str) -> dict[str, str]:
    of = {"number": str(number)} if number else {}
    return {"journal": name, "volume": str(volume), **of, "pages": pages}


_ARXIV = "https://arxiv.org/abs/"
_JMLR = "Journal of Machine Learning Research"

PAPERS = {
    f"{_ARXIV}2002.11803": Paper(
        "Naman Agarwal and Rohan Anil and Elad Hazan and Tomer Koren and Cyril Zhang"
    ),
    "https://proceedings.mlr.press/v97/agarwal19b.html": Paper(
        "Naman Agarwal and Brian Bullins and Xinyi Chen and Elad Hazan and Karan Singh and "
        "Cyril Zhang and Yi Zhang",
        _icml(36, "97", "102--110"),
    ),
    f"{_ARXIV}2503.20762": Paper(
        "Kang An and Yuxing Liu and Rui Pan and Yi Ren and Shiqian Ma and Donald Goldfarb and "
        "Tong Zhang"
    ),
    f"{_ARXIV}2002.09018": Paper(
        "Rohan Anil and Vineet Gupta and Tomer Koren and Kevin Regan and Yoram Singer"
    ),
    f"{_ARXIV}1709.07417": Paper(
        "Irwan Bello and Barret Zoph and Vijay Vasudevan and Quoc V. Le",
        _icml(34, "70", "459--468"),
    ),
    f"{_ARXIV}2510.12402": Paper(
        "Lizhang Chen and Jonathan Li and Kaizhao Liang and Baiyu Su and Cong Xie and "
        "Nuo Wang Pierse and Chen Liang and Ni Lao and Qiang Liu"
    ),
    f"{_ARXIV}1604.00981": Paper(
        "Jianmin Chen and Xinghao Pan and Rajat Monga and Samy Bengio and Rafal Jozefowicz"
    ),
    "https://doi.org/10.1016/j.automatica.2006.06.015": Paper(
        "Jorge Cortés", _journal("Automatica", 42, 11, "1993--2000")
    ),
    f"{_ARXIV}1810.04805": Paper(
        "Jacob Devlin and Ming-Wei Chang and Kenton Lee and Kristina Toutanova",
        {
            "booktitle": "Proceedings of the 2019 Conference of the North American Chapter of the "
            "Association for Computational Linguistics: Human Language Technologies",
            "pages": "4171--4186",
        },
    ),
    f"{_ARXIV}2311.08105": Paper(
        "Arthur Douillard and Qixuan Feng and Andrei A. Rusu and Rachita Chhaparia and "
        "Yani Donchev and Adhiguna Kuncoro and Marc'Aurelio Ranzato and Arthur Szlam and "
        "Jiajun Shen"
    ),
    f"{_ARXIV}2501.18512": Paper(
        "Arthur Douillard and Yanislav Donchev and Keith Rush and Satyen Kale and "
        "Zachary Charles and Zachary Garrett and Gabriel Teston and Dave Lacey and "
        "Ross McIlroy and Jiajun Shen and Alexandre Ramé and Arthur Szlam and "
        "Marc'Aurelio Ranzato and Paul Barham"
    ),
    "https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ": Paper("Timothy Dozat"),
    "https://jmlr.org/papers/v10/duchi09a.html": Paper(
        "John Duchi and Yoram Singer", _journal(_JMLR, 10, None, "2899--2934")
    ),
    "https://jmlr.org/papers/v12/duchi11a.html": Paper(
        "John Duchi and Elad Hazan and Yoram Singer", _journal(_JMLR, 12, None, "2121--2159")
    ),
    f"{_ARXIV}1308.0850": Paper("Alex Graves"),
    f"{_ARXIV}1802.09568": Paper(
        "Vineet Gupta and Tomer Koren and Yoram Singer", _icml(35, "80", "1842--1850")
    ),
    f"{_ARXIV}1502.02551": Paper(
        "Suyog Gupta and Ankur Agrawal and Kailash Gopalakrishnan and Pritish Narayanan",
        _icml(32, "37", "1737--1746"),
    ),
    f"{_ARXIV}1710.02368": Paper("Joeri R. Hermans and Gerasimos Spanakis and Rico Möckel"),
    f"{_ARXIV}1207.0580": Paper(
        "Geoffrey E. Hinton and Nitish Srivastava and Alex Krizhevsky and Ilya Sutskever and "
        "Ruslan R. Salakhutdinov"
    ),
    "https://kellerjordan.github.io/posts/muon/": Paper(
        "Keller Jordan and Yuchen Jin and Vlado Boza and Jiacheng You and Franz Cesista and "
        "Laker Newhouse and Jeremy Bernstein"
    ),
    f"{_ARXIV}1412.6980": Paper("Diederik P. Kingma and Jimmy Ba", _iclr("3rd")),
    f"{_ARXIV}2509.03378": Paper(
        "Wu Lin and Scott C. Lowe and Felix Dangel and Runa Eschenhagen and Zikun Xu and "
        "Roger B. Grosse"
    ),
    f"{_ARXIV}2502.16982": Paper(
        "Jingyuan Liu and Jianlin Su and Xingcheng Yao and Zhejun Jiang and Guokun Lai and "
        "Yulun Du and Yidao Qin and Weixin Xu and Enzhe Lu and Junjie Yan and Yanru Chen and "
        "Huabin Zheng and Yibo Liu and Shaowei Liu and Bohong Yin and Weiran He and Han Zhu and "
        "Yuzhi Wang and Jianzhou Wang and Mengnan Dong and Zheng Zhang and Yongsheng Kang and "
        "Hao Zhang and Xinran Xu and Yutao Zhang and Yuxin Wu and Xinyu Zhou and Zhilin Yang"
    ),
    f"{_ARXIV}1711.05101": Paper("Ilya Loshchilov and Frank Hutter", _iclr("7th")),
    "https://research.google/pubs/ad-click-prediction-a-view-from-the-trenches/": Paper(
        "H. Brendan McMahan and Gary Holt and D. Sculley and Michael Young and Dietmar Ebner and "
        "Julian Grady and Lan Nie and Todd Phillips and Eugene Davydov and Daniel Golovin and "
        "Sharat Chikkerur and Dan Liu and Martin Wattenberg and Arnar Mar Hrafnkelsson and "
        "Tom Boulos and Jeremy Kubica",
        {
            "booktitle": "Proceedings of the 19th ACM SIGKDD International Conference on Knowledge "
            "Discovery and Data Mining",
            "pages": "1222--1230",
        },
    ),
    f"{_ARXIV}1602.05629": Paper(
        "H. Brendan McMahan and Eider Moore and Daniel Ramage and Seth Hampson and "
        "Blaise Agüera y Arcas"
    ),
    f"{_ARXIV}2602.23349": Paper(
        "Jose Javier {Gonzalez Ortiz} and Abhay Gupta and Chris Renard and Davis Blalock"
    ),
    "https://doi.org/10.1137/0330046": Paper(
        "Boris T. Polyak and Anatoli B. Juditsky",
        _journal("SIAM Journal on Control and Optimization", 30, 4, "838--855"),
    ),
    "https://doi.org/10.1016/0041-5553(64)90137-5": Paper(
        "Boris T. Polyak",
        _journal("USSR Computational Mathematics and Mathematical Physics", 4, 5, "1--17"),
    ),
    f"{_ARXIV}1910.02054": Paper(
        "Samyam Rajbhandari and Jeff Rasley and Olatunji Ruwase and Yuxiong He"
    ),
    "https://openreview.net/forum?id=ryQu7f-RZ": Paper(
        "Sashank J. Reddi and Satyen Kale and Sanjiv Kumar", _iclr("6th")
    ),
    "https://doi.org/10.1214/aoms/1177729586": Paper(
        "Herbert Robbins and Sutton Monro",
        _journal("The Annals of Mathematical Statistics", 22, 3, "400--407"),
    ),
    f"{_ARXIV}1804.04235": Paper("Noam Shazeer and Mitchell Stern", _icml(35, "80", "4596--4604")),
    f"{_ARXIV}2309.06497": Paper(
        "Hao-Jun Michael Shi and Tsung-Hsien Lee and Shintaro Iwasaki and Jose Gallego-Posada and "
        "Zhijing Li and Kaushik Rangadurai and Dheevatsa Mudigere and Michael Rabbat"
    ),
    "https://proceedings.mlr.press/v28/sutskever13.html": Paper(
        "Ilya Sutskever and James Martens and George Dahl and Geoffrey Hinton",
        _icml(30, "28", "1139--1147"),
    ),
    "https://www.cs.toronto.edu/~tijmen/csc321/slides/lecture_slides_lec6.pdf": Paper(
        "Tijmen Tieleman and Geoffrey Hinton"
    ),
    f"{_ARXIV}2409.11321": Paper(
        "Nikhil Vyas and Depen Morwani and Rosie Zhao and Mujin Kwun and Itai Shapira and "
        "David Brandfonbrener and Lucas Janson and Sham Kakade"
    ),
    "https://whenwen.github.io/wd_blog/public/hyperball-part-1.html": Paper(
        "Kaiyue Wen and Xingyu Dang and Kaifeng Lyu and Tengyu Ma and Percy Liang"
    ),
    f"{_ARXIV}2605.25395": Paper(
        "Chung-Yiu Yau and Dawei Li and Athanasios Glentis and Valentyn Boreiko and "
        "Hoi-To Wai and Mingyi Hong"
    ),
    f"{_ARXIV}1904.00962": Paper(
        "Yang You and Jing Li and Sashank Reddi and Jonathan Hseu and Sanjiv Kumar and "
        "Srinadh Bhojanapalli and Xiaodan Song and James Demmel and Kurt Keutzer and "
        "Cho-Jui Hsieh",
        _iclr("8th"),
    ),
    f"{_ARXIV}1708.03888": Paper("Yang You and Igor Gitman and Boris Ginsburg"),
    f"{_ARXIV}1212.5701": Paper("Matthew D. Zeiler"),
    f"{_ARXIV}1412.6651": Paper(
        "Sixin Zhang and Anna Choromanska and Yann LeCun",
        {"booktitle": "Advances in Neural Information Processing Systems", "volume": "28"},
    ),
    f"{_ARXIV}2204.06240": Paper(
        "Zangwei Zheng and Pengtai Xu and Xuan Zou and Da Tang and Zhen Li and Chenguang Xi and "
        "Peng Wu and Leqi Zou and Yijie Zhu and Ming Chen and Xiangzhuo Ding and Fuzhao Xue and "
        "Ziheng Qin and Youlong Cheng and Yang You"
    ),
}
